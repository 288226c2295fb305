"""`omnitrain bench`: measure a recipe without training it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnitrain.errors import RunError, UsageError

if TYPE_CHECKING:
    from omnitrain.recipe.loader import Loaded

_Recipes = Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files, merged left to right.", show_default=False)]
_Sets = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; the value in TOML syntax.")]
_Agreement = Annotated[bool, typer.Option("--agreement", help="Engine against trainer: log-probs of the same tokens, by modality.")]
_Determinism = Annotated[bool, typer.Option("--determinism", help="A few steps with deterministic = true, twice, and without: the cost, and whether the two are equal.")]
_Dtypes = Annotated[str | None, typer.Option(metavar="A,B", help="With --agreement: measure in these dtypes, one after the other; default the recipe's.")]
_Steps = Annotated[int, typer.Option(min=2, help="With --determinism: steps of each run; the first is not timed.")]
_Devices = Annotated[int | None, typer.Option(min=1, help="Ranks; default one per accelerator.")]
_DTYPES = ("float32", "bfloat16")


def register(app: typer.Typer) -> None:
    """Add `bench` to the main command."""
    app.command()(bench)


def bench(
    recipe: _Recipes,
    agreement: _Agreement = False,
    determinism: _Determinism = False,
    dtypes: _Dtypes = None,
    steps: _Steps = 4,
    sets: _Sets = [],
    devices: _Devices = None,
) -> None:
    """Measure how far the engine's log-probs are from the trainer's, or what `deterministic = true` costs."""
    from omnitrain.recipe.loader import load

    if agreement == determinism:
        raise UsageError("bench measures one thing at a time; say which: --agreement or --determinism")
    if dtypes and determinism:
        raise UsageError("--dtypes has no effect with --determinism; set model.dtype by --set")
    loaded = load(recipe, sets)
    with tempfile.TemporaryDirectory(prefix="omnitrain-bench-") as folder:
        if agreement:
            _agreement(loaded, Path(folder), dtypes, devices)
        else:
            _determinism(loaded, Path(folder), steps, devices)


def _agreement(loaded: Loaded, folder: Path, dtypes: str | None, devices: int | None) -> None:
    from omnitrain.evaluation.agreement import agreement_recipe, table
    from omnitrain.launch import launch, visible_accelerators
    from omnitrain.rundir import RunDir

    if loaded.recipe.rollout is None:
        raise UsageError(f'algorithm.kind = "{loaded.recipe.algorithm.kind}" has no [rollout]: there is no engine to compare')
    chosen = dtypes.split(",") if dtypes else [loaded.recipe.model.dtype]
    if unknown := [name for name in chosen if name not in _DTYPES]:
        raise UsageError(f"--dtypes {unknown[0]}: choose from {', '.join(_DTYPES)}")
    here = visible_accelerators()
    found = []
    for dtype in chosen:
        place = folder / dtype
        place.mkdir()
        run = RunDir(place / "run")
        run.prepare(agreement_recipe(loaded.recipe, place, dtype=dtype))
        code = launch(run, devices or here.count, kind=here.kind, module="omnitrain.train.bench")
        if code:
            raise typer.Exit(code)
        found += json.loads((run.path / "agreement.json").read_text())
        run.unlock()
    typer.echo(f"{found[0]['engine']} against the trainer, {found[0]['ranks']} ranks on {here.kind}")
    typer.echo(table(found))


def _determinism(loaded: Loaded, folder: Path, steps: int, devices: int | None) -> None:
    from omnitrain.evaluation.determinism import MODULE, RESULT, Repeated, difference, lines, repeated_recipe
    from omnitrain.launch import launch, visible_accelerators
    from omnitrain.recipe.loader import check_files
    from omnitrain.rundir import RunDir
    from omnitrain.train.metrics import comparable

    check_files(loaded)
    here = visible_accelerators()
    count = devices or here.count
    runs = []
    for name, on in (("off", False), ("on", True), ("again", True)):
        run = RunDir(folder / name)
        run.prepare(repeated_recipe(loaded.recipe, on, steps))
        code = launch(run, count, kind=here.kind, module=MODULE, deterministic=on)
        if code:
            raise typer.Exit(code)
        logged = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        runs.append(Repeated(on, logged, json.loads((run.path / RESULT).read_text())))
        run.unlock()
    off, *on = runs
    found = difference(*on, comparable)
    typer.echo(f"{loaded.recipe.name}: {steps} steps on {count} {here.kind} {'rank' if count == 1 else 'ranks'}")
    for line in lines(off, tuple(on), found):
        typer.echo(line)
    if found is not None:
        raise RunError(f"deterministic = true gave two different runs: {found}")
