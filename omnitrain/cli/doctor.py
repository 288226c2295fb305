"""`omnitrain doctor`: one line per check, a tick, a warning or a cross, and a fix to paste."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

_Recipes = Annotated[list[Path] | None, typer.Argument(metavar="[RECIPE...]", help="Also check what this recipe needs.", show_default=False)]
_Sets = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the recipe.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON list of findings.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Leave out what starts processes: imports, two ranks, the engine.")]
_MARKS = {"ok": ("✓", "ok", "green"), "warning": ("!", "!", "yellow"), "problem": ("✗", "x", "red")}


def register(app: typer.Typer) -> None:
    """Add `doctor` to the main command."""
    app.command()(doctor)


def doctor(recipe: _Recipes = None, sets: _Sets = [], json: _Json = False, quick: _Quick = False) -> None:
    """Check this machine, and with a recipe whether it can run here. Exit code 1 if something is broken."""
    from omnitrain.doctor import all_checks
    from omnitrain.doctor.check import PROBLEM, run_checks

    loaded = None
    if recipe:
        from omnitrain.recipe.loader import load

        loaded = load(recipe, sets)
    findings = []
    for finding in run_checks(all_checks(loaded, quick=quick)):
        findings.append(finding)
        if not json:
            _show(finding)
    if json:
        from json import dumps

        typer.echo(dumps([finding.as_dict() for finding in findings], indent=1))
    problems = sum(finding.status == PROBLEM for finding in findings)
    if not json:
        warnings = sum(finding.status == "warning" for finding in findings)
        typer.echo(f"{len(findings)} checks, {warnings} warnings, {problems} problems")
    if problems:
        raise typer.Exit(1)


def _show(finding) -> None:
    mark, plain, colour = _MARKS[finding.status]
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        mark = plain
    # click drops the colour by itself where the output is no terminal.
    typer.echo(f"{typer.style(mark, fg=colour)} {finding.name:<18} {finding.detail}")
    if finding.fix:
        typer.echo(f"    fix: {finding.fix}")
