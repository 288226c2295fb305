"""A recipe on this machine: its files, its media, its model, its rewards, and whether it fits."""

from __future__ import annotations

from omnitrain.doctor.check import OK, PROBLEM, WARNING, Check, Finding, first_line, run_python
from omnitrain.errors import DataError, ModelError, OmnitrainError
from omnitrain.recipe.loader import Loaded
from omnitrain.recipe.schema import Recipe

MEDIA_ROWS = 32


def checks(loaded: Loaded, devices: int | None = None, memory_gib: float | None = None) -> list[Check]:
    """The checks of this file. `devices` and `memory_gib` (of one device) replace what the machine has."""
    recipe = loaded.recipe
    listed = [Check("recipe data", lambda: data_files(recipe)), Check("recipe model", lambda: model(recipe))]
    listed += [Check(f"recipe rewards[{i}]", lambda i=i: reward(recipe, i)) for i in range(len(recipe.rewards))]
    if recipe.model.init_from is not None:
        listed.append(Check("recipe init_from", lambda: starting_weights(recipe)))
    return [*listed, Check("recipe memory", lambda: memory(recipe, devices, memory_gib))]


def data_files(recipe: Recipe) -> list[Finding]:
    """Each data file: that it opens, how many rows it has, and that the media of its first rows decode."""
    files = {"data.train": recipe.data.train, "data.validation": recipe.data.validation}
    return [_data_file(field, path) for field, path in files.items() if path is not None]


def _data_file(field: str, path) -> Finding:
    from omnitrain.data.media import load_audio, load_image
    from omnitrain.data.schema import RowFile

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
                else:
                    continue
                opened += 1
    except DataError as error:
        return Finding(name, PROBLEM, first_line(str(error), 240), f"omnitrain prepare --help  # then --set {field}=FILE")
    media = f", {opened} media files of the first rows decode" if opened else ""
    return Finding(name, OK, f"{path}: {len(rows)} rows{media}")


def model(recipe: Recipe) -> Finding:
    """The checkpoint: of this family, and all its weight files there."""
    from omnitrain.models.qwen3_omni.weights import Checkpoint

    try:
        checkpoint = Checkpoint(recipe.model.path)
    except ModelError as error:
        fix = "omnitrain prepare tiny qwen3_omni DIR  # or download the model, then --set model.path=DIR"
        return Finding("recipe model", PROBLEM, first_line(str(error), 240), fix)
    return Finding("recipe model", OK, f"{checkpoint.path}: all weight files are there")


def reward(recipe: Recipe, index: int) -> Finding:
    """A reward's function imports, in a process of its own as in a run."""
    spec, name = recipe.rewards[index], f"recipe rewards[{index}]"
    known = {"kind": spec.kind, "function": getattr(spec, "function", None)}
    code = f"from types import SimpleNamespace as S; from omnitrain.rewards import load_reward; load_reward(S(**{known!r}))"
    outcome = run_python(["-c", code], timeout=120)
    what = known["function"] or spec.kind
    if outcome.code:
        fix = "export PYTHONPATH=DIRECTORY_OF_THE_MODULE" if known["function"] else "make install"
        return Finding(name, PROBLEM, f"{what}: {outcome.reason()}", fix)
    return Finding(name, OK, f"{what} imports")


def starting_weights(recipe: Recipe) -> Finding:
    """The run whose weights this one starts from has a whole checkpoint."""
    from pathlib import Path

    from omnitrain.rundir import RunDir, latest_checkpoint

    run = RunDir(Path(recipe.model.init_from))
    newest, _ = latest_checkpoint(run.checkpoints) if run.checkpoints.is_dir() else (None, [])
    if newest is None:
        fix = f"omnitrain train {run.recipe_file}" if run.recipe_file.exists() else "omnitrain train RECIPE --unset model.init_from"
        return Finding("recipe init_from", PROBLEM, f"{run.path} holds no whole checkpoint", fix)
    return Finding("recipe init_from", OK, str(newest))


def memory(recipe: Recipe, devices: int | None, memory_gib: float | None) -> Finding:
    """The plan's verdict for the accelerators of this machine."""
    from omnitrain.launch import visible_accelerators
    from omnitrain.recipe.plan import make_plan

    found = visible_accelerators()
    count = devices or found.count
    memory_gib = memory_gib or _memory_of_one(found.kind, count)
    try:
        plan = make_plan(recipe, count, memory_gib)
    except OmnitrainError as error:
        return Finding("recipe memory", PROBLEM, first_line(str(error), 240), "omnitrain plan RECIPE --devices N")
    where = f"{count} x {found.kind} with {memory_gib:.1f} GiB" if memory_gib else f"{count} x {found.kind}"
    if plan.verdict == "fits":
        return Finding("recipe memory", OK, f"fits {where}")
    if plan.verdict is None:
        missing = "the model's sizes are" if memory_gib else "the memory of an accelerator is"
        return Finding("recipe memory", WARNING, f"no verdict: {missing} not known", "omnitrain plan RECIPE --memory GIB")
    status = WARNING if plan.verdict == "tight" else PROBLEM
    return Finding("recipe memory", status, f"{plan.verdict} on {where}", plan.knob or "omnitrain plan RECIPE")


def _memory_of_one(kind: str, count: int) -> float | None:
    """GiB of one device; on a CPU each rank's share of the main memory that is free."""
    if kind == "cpu":
        import psutil

        return psutil.virtual_memory().available / 2**30 / count
    code = "from omnitrain import device as d; print('GIB', d.memory(d.current_device(0)).total)"
    outcome = run_python(["-c", code], timeout=120)
    return next((float(line.split()[1]) for line in outcome.out.splitlines() if line.startswith("GIB ")), None)
