"""`omnitrain export`: trained weights as files that PEFT, transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnitrain.errors import UsageError

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)]
_Step = Annotated[int | None, typer.Option(metavar="N", min=0, help="The checkpoint after step N; default the newest.")]
_Best = Annotated[bool, typer.Option("--best", help="The checkpoint that checkpoint.keep_best chose.")]
_Out = Annotated[Path | None, typer.Option(metavar="DIR", help="New directory; default RUN/exports/step_N-adapter or -merged.")]
_Merged = Annotated[bool, typer.Option("--merged", help="A whole checkpoint with the trained weights in it, not an adapter.")]
_Ema = Annotated[bool, typer.Option("--ema", help="The moving average of the weights (train.ema).")]


def register(app: typer.Typer) -> None:
    """Add `export` to the main command."""
    app.command()(export)


def export(
    run: _Run, step: _Step = None, best: _Best = False, out: _Out = None, merged: _Merged = False, ema: _Ema = False
) -> None:
    """Write a run's adapter for PEFT, or with --merged a checkpoint that transformers and vLLM load."""
    if best and step is not None:
        raise UsageError("--best and --step both choose the checkpoint; give one of them")
    if not run.is_dir():
        raise UsageError(f"{run} is no directory; give a run directory, such as runs/NAME")
    from omnitrain.export import export as write
    from omnitrain.rundir import RunDir

    written = write(RunDir(run), step=step, best=best, out=out, merged=merged, ema=ema, say=typer.echo)
    typer.echo(f"written to {written}")
