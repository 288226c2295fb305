"""A recipe on this machine: its files, its media, its model, its rewards, and whether it fits."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from omnitrain.doctor.check import OK, PROBLEM, WARNING, Check, Finding, first_line, run_python
from omnitrain.errors import DataError, ModelError, OmnitrainError, RunError, UsageError
from omnitrain.recipe.loader import Loaded
from omnitrain.recipe.schema import Recipe
from omnitrain.recipe.sizes import hub_name

MEDIA_ROWS = 32


def checks(loaded: Loaded, devices: int | None = None, memory_gib: float | None = None) -> list[Check]:
    """The checks of this file. `devices` and `memory_gib` (of one device) replace what the machine has."""
    recipe, files = loaded.recipe, [document.name for document in loaded.documents]
    listed = [Check("recipe data", lambda: data_files(recipe)), Check("recipe model", lambda: model(recipe))]
    listed += [Check(f"recipe rewards[{i}]", lambda i=i: reward(recipe, i, files)) for i in range(len(recipe.rewards))]
    for field in ("init_from", "adapter"):
        if getattr(recipe.model, field) is not None:
            listed.append(Check(f"recipe {field}", lambda field=field: starting_weights(recipe, files, field)))
    return [*listed, Check("recipe memory", lambda: memory(recipe, devices, memory_gib, files))]


def data_files(recipe: Recipe) -> list[Finding]:
    """Each data file: that it opens, how many rows it has, and that the media of its first rows decode."""
    train = [_data_file("data.train", file.path) for file in recipe.data.train_files]
    return train + [_data_file("data.validation", path) for path in recipe.data.validation_files]


def _data_file(field: str, path) -> Finding:
    from omnitrain.data.media import load_audio, load_image, load_video
    from omnitrain.data.schema import RowFile
    from omnitrain.data.video import FrameSampling

    name = f"recipe {field}"
    opened = 0
    try:
        rows = RowFile(path)
        for index in range(min(MEDIA_ROWS, len(rows))):
            row = rows[index]
            for part in (part for message in row.messages for part in message.content):
                if part.type == "image":
                    load_image(part, row.root)
                elif part.type == "audio":
                    load_audio(part, row.root)
                elif part.type == "video":
                    load_video(part, row.root, FrameSampling())
                else:
                    continue
                opened += 1
    except DataError as error:
        fix = f"omnitrain prepare --help  # one of its data sets; write it to {quote(str(path.parent))}"
        return Finding(name, PROBLEM, first_line(str(error), 240), fix)
    media = f", {opened} media files of the first rows decode" if opened else ""
    return Finding(name, OK, f"{path}: {len(rows)} rows{media}")


def model(recipe: Recipe) -> Finding:
    """The checkpoint: of this family, and all its weight files there."""
    from omnitrain.models.qwen3_omni.weights import Checkpoint

    try:
        checkpoint = Checkpoint(recipe.model.path)
    except ModelError as error:
        return Finding("recipe model", PROBLEM, first_line(str(error), 240), _model_fix(recipe.model.path))
    return Finding("recipe model", OK, f"{checkpoint.path}: all weight files are there")


def _model_fix(path: str) -> str:
    """A download where `path` is a hub name; where it is a directory, a random model to try the recipe with."""
    if hub_name(path):
        return f"hf download {path}"
    if Path(path).exists():  # something is there, and nothing may be written over it
        return f"ls -l {quote(path)}"
    return f"omnitrain prepare tiny qwen3_omni {quote(path)}  # a tiny random model; or correct model.path"


def reward(recipe: Recipe, index: int, files: list[str] = ["recipe.toml"]) -> Finding:
    """A reward's function imports, in a process of its own as in a run; an endpoint answers."""
    from omnitrain.rewards import ENDPOINTS, fields

    spec, name = recipe.rewards[index], f"recipe rewards[{index}]"
    if spec.kind in ENDPOINTS:
        return _endpoint(name, spec, index, files)
    known = {"function": None} | fields(spec)
    code = f"from types import SimpleNamespace as S; from omnitrain.rewards import load_reward; load_reward(S(**{known!r}))"
    outcome = run_python(["-c", code], timeout=120)
    what = known["function"] or spec.kind
    if outcome.code:
        fix = _module_fix(known["function"], files) if known["function"] else "make install"
        return Finding(name, PROBLEM, f"{what}: {outcome.reason()}", fix)
    return Finding(name, OK, f"{what} imports")


def _endpoint(name: str, spec, index: int, files: list[str]) -> Finding:
    import asyncio

    from omnitrain.rewards.endpoints import check

    try:
        asyncio.run(check(f"rewards[{index}]", spec))
    except UsageError as error:
        return Finding(name, PROBLEM, first_line(str(error), 240), f"read -rs {spec.api_key_env} && export {spec.api_key_env}")
    except RunError as error:
        return Finding(name, PROBLEM, first_line(str(error), 320), _serve(spec, files))
    return Finding(name, OK, f"{spec.url} answers")


def _serve(spec, files: list[str]) -> str:
    """The command that serves an endpoint of this machine, on the last accelerator where there are several."""
    from omnitrain.launch import visible_accelerators

    url = urlsplit(spec.url)
    if url.hostname not in ("localhost", "127.0.0.1", "::1") or not hasattr(spec, "model"):
        return f"curl -i {quote(spec.url)}  # start the server there, or correct rewards[].url"
    command = f"vllm serve {quote(spec.model)} --port {url.port or 80}"
    count = visible_accelerators().count
    if count < 2:
        return command
    train = f"omnitrain train {' '.join(map(quote, files))} --devices {count - 1}"
    return f"CUDA_VISIBLE_DEVICES={count - 1} {command}  # and the run on the others: {train}"


def _module_fix(function: str, files: list[str]) -> str:
    """The module's directory on the path where it lies beside a recipe and not here; else its own traceback."""
    module = function.partition(":")[0].split(".")[0]
    for folder in (Path(file).absolute().parent for file in files):
        there = (folder / f"{module}.py").exists() or (folder / module).is_dir()
        if there and folder != Path.cwd():
            return f'export PYTHONPATH={quote(str(folder))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    return f"python -c 'import {function.partition(':')[0]}'  # in {quote(str(Path.cwd()))}, where the module is looked for"


def starting_weights(recipe: Recipe, files: list[str] = ["recipe.toml"], field: str = "init_from") -> Finding:
    """The run, or the adapter, that this one starts from is there and of the same parameters."""
    from omnitrain.rundir import RunDir
    from omnitrain.starts import problem

    name, given = f"recipe {field}", getattr(recipe.model, field)
    found = problem(recipe)
    if found is None:
        return Finding(name, OK, given)
    run = RunDir(Path(given))
    fix = f"omnitrain train {' '.join(map(quote, files))} --unset model.{field}"
    if run.recipe_file.exists() and not run.resumes():
        fix = f"omnitrain train {quote(str(run.recipe_file))} --run-dir {quote(str(run.path))}"
    return Finding(name, PROBLEM, first_line(found, 320), fix)


def memory(
    recipe: Recipe, devices: int | None, memory_gib: float | None, files: list[str] = ["recipe.toml"]
) -> Finding:
    """The plan's verdict for the accelerators of this machine."""
    from omnitrain.launch import visible_accelerators
    from omnitrain.recipe.plan import make_plan

    command = f"omnitrain plan {' '.join(map(quote, files))}"
    found = visible_accelerators()
    count = devices or found.count
    memory_gib = memory_gib or _memory_of_one(found.kind, count)
    try:
        plan = make_plan(recipe, count, memory_gib)
    except OmnitrainError as error:
        fix = f"{command} --devices {_fitting(recipe, count)}"
        return Finding("recipe memory", PROBLEM, first_line(str(error), 240), fix)
    where = f"{count} x {found.kind} with {memory_gib:.1f} GiB" if memory_gib else f"{count} x {found.kind}"
    if plan.verdict == "fits":
        return Finding("recipe memory", OK, f"fits {where}")
    if plan.verdict is None:
        missing = "the model's sizes are" if memory_gib else "the memory of an accelerator is"
        fix = f"{command} --devices {count} --memory 80"
        return Finding("recipe memory", WARNING, f"no verdict: {missing} not known", fix)
    status = WARNING if plan.verdict == "tight" else PROBLEM
    return Finding("recipe memory", status, f"{plan.verdict} on {where}", plan.knob or command)


def _fitting(recipe: Recipe, count: int) -> int:
    """The least number of devices, `count` or more, that the engines divide."""
    parallel = getattr(recipe.rollout, "tensor_parallel", 1)
    return -(-count // parallel) * parallel


def _memory_of_one(kind: str, count: int) -> float | None:
    """GiB of one device; on a CPU each rank's share of the main memory that is free."""
    if kind == "cpu":
        import psutil

        return psutil.virtual_memory().available / 2**30 / count
    code = "from omnitrain import device as d; print('GIB', d.memory(d.current_device(0)).total)"
    outcome = run_python(["-c", code], timeout=120)
    return next((float(line.split()[1]) for line in outcome.out.splitlines() if line.startswith("GIB ")), None)
