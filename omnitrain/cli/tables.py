"""Aligned text tables. rich would do it too, but its import is a fifth of what `plan` and `recipes` may take."""

import os
from collections.abc import Iterable, Sequence

import typer


def style(text: str, **styles) -> str:
    """`text` in a style, unless NO_COLOR is set. typer.echo takes styles out again off a terminal."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, **styles)


def echo_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False, dim=lambda row: False
) -> None:
    """Print rows under a bold header. `right` aligns all but the first column; `dim` says which rows matter less."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [cell.rjust(widths[i]) if right and i else cell.ljust(widths[i]) for i, cell in enumerate(cells)]
        return "  ".join(aligned).rstrip()

    typer.echo(style(line(header), bold=True))
    for row in rows:
        typer.echo(style(line(row), dim=True) if dim(row) else line(row))
