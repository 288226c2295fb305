"""`omnitrain bench`: measure a recipe without training it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnitrain.errors import UsageError

_Recipes = Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files, merged left to right.", show_default=False)]
_Sets = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; the value in TOML syntax.")]
_Agreement = Annotated[bool, typer.Option("--agreement", help="Engine against trainer: log-probs of the same tokens, by modality.")]
_Dtypes = Annotated[str | None, typer.Option(metavar="A,B", help="Measure in these dtypes, one after the other; default the recipe's.")]
_Devices = Annotated[int | None, typer.Option(min=1, help="Ranks; default one per accelerator.")]
_DTYPES = ("float32", "bfloat16")


def register(app: typer.Typer) -> None:
    """Add `bench` to the main command."""
    app.command()(bench)


def bench(
    recipe: _Recipes, agreement: _Agreement = False, dtypes: _Dtypes = None, sets: _Sets = [], devices: _Devices = None
) -> None:
    """Measure how far the engine's log-probs are from the trainer's, by modality."""
    if not agreement:
        raise UsageError("bench measures one thing so far; say which: --agreement")
    import json
    import tempfile

    from omnitrain.evaluation.agreement import agreement_recipe, table
    from omnitrain.launch import launch, visible_accelerators
    from omnitrain.recipe.loader import load
    from omnitrain.rundir import RunDir

    loaded = load(recipe, sets)
    if loaded.recipe.rollout is None:
        raise UsageError(f'algorithm.kind = "{loaded.recipe.algorithm.kind}" has no [rollout]: there is no engine to compare')
    chosen = dtypes.split(",") if dtypes else [loaded.recipe.model.dtype]
    if unknown := [name for name in chosen if name not in _DTYPES]:
        raise UsageError(f"--dtypes {unknown[0]}: choose from {', '.join(_DTYPES)}")
    found_devices = visible_accelerators()
    found = []
    with tempfile.TemporaryDirectory(prefix="omnitrain-bench-") as folder:
        for dtype in chosen:
            place = Path(folder) / dtype
            place.mkdir()
            run = RunDir(place / "run")
            run.prepare(agreement_recipe(loaded.recipe, place, dtype=dtype))
            code = launch(run, devices or found_devices.count, kind=found_devices.kind, module="omnitrain.train.bench")
            if code:
                raise typer.Exit(code)
            found += json.loads((run.path / "agreement.json").read_text())
            run.unlock()
    typer.echo(f"{found[0]['engine']} against the trainer, {found[0]['ranks']} ranks on {found_devices.kind}")
    typer.echo(table(found))
