"""`omnitrain schema`: the recipe's JSON Schema."""

import json
from pathlib import Path
from typing import Annotated

import typer

from omnitrain.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add `schema` to the main command."""
    app.command()(schema)


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead of the screen.")
    ] = None,
) -> None:
    """JSON Schema of a recipe (draft 4), for editors; Taplo follows `#:schema ./omnitrain.schema.json`."""
    from omnitrain.recipe.json_schema import json_schema

    text = json.dumps(json_schema(), indent=2)
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
