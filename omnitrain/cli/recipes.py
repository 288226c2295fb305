"""`omnitrain recipes`: list, show and copy the recipes that ship."""

import json
from pathlib import Path
from typing import Annotated

import typer

from omnitrain.errors import UsageError

app = typer.Typer(help="List, show or copy the recipes that ship.")


def register(parent: typer.Typer) -> None:
    """Add `recipes` to the main command."""
    parent.add_typer(app, name="recipes")


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """The recipes that ship; without a subcommand, the list."""
    if context.invoked_subcommand is None:
        list_()


@app.command("list")
def list_() -> None:
    """A table of all recipes."""
    from omnitrain.cli.tables import echo_table
    from omnitrain.recipe.loader import load
    from omnitrain.recipe.shipped import all_shipped

    rows = []
    for item in all_shipped():
        recipe = load([item.path]).recipe
        model = recipe.model.path.rsplit("/", 1)[-1]
        notes = (item.notes.get("accelerators", "-"), item.notes.get("verified on", "not yet"))
        rows.append((item.name, model, recipe.algorithm.kind, item.task, *notes))
    echo_table(("name", "model", "algorithm", "task", "accelerators", "verified on"), rows)
    typer.echo("\nomnitrain recipes copy NAME writes one here, ready to edit.")


@app.command()
def show(name: Annotated[str, typer.Argument(help="As listed, or just the last part.")]) -> None:
    """Print a recipe."""
    from omnitrain.recipe.shipped import find

    typer.echo(find(name).path.read_text(encoding="utf-8"), nl=False)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="As listed, or just the last part.")],
    destination: Annotated[Path, typer.Argument(help="A file or a folder.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a recipe, with the schema beside it so that editors complete and check it."""
    from omnitrain.recipe.json_schema import FILE_NAME, json_schema
    from omnitrain.recipe.shipped import find

    found = find(name)
    target = destination / found.path.name if destination.is_dir() or not destination.suffix else destination
    if target.exists() and not force:
        raise UsageError(f"{target} exists; choose another name, or overwrite it with --force")
    text = found.path.read_text(encoding="utf-8")
    if not text.startswith("#:schema"):
        text = f"#:schema ./{FILE_NAME}\n{text}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / FILE_NAME).write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None
    typer.echo(f"{target} (schema: {target.parent / FILE_NAME}); next: omnitrain plan {target}")
