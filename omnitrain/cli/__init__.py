"""The `omnitrain` command. Each subcommand is a module here; none imports torch or vllm, and --help imports none of pydantic."""

import os
import sys
import traceback
from typing import Annotated

import typer

from omnitrain import __version__
from omnitrain.cli import bench, doctor, explain, export, plan, prepare, recipes, rehearse, schema, train
from omnitrain.errors import OmnitrainError, environment_fault
from omnitrain.launch import TRACEBACK

app = typer.Typer(
    name="omnitrain",
    help="Post-train omni-modal models with reinforcement learning: one TOML recipe, one command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (train, plan, rehearse, prepare, recipes, doctor, bench, export, schema, explain):
    module.register(app)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"omnitrain {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Options of every subcommand."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 ok, 1 failed, 2 usage or recipe, 3 a gate, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    arguments, rest = _split(arguments)
    if "--traceback" in arguments:  # wherever it stands
        os.environ[TRACEBACK] = "1"
        arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        typer.main.get_command(app).main(arguments, prog_name="omnitrain", obj=rest)
    except OmnitrainError as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        _print_error(f"error: {error}")
        sys.exit(error.exit_code)
    except Exception as error:
        if (fault := environment_fault(error)) and not os.environ.get(TRACEBACK):
            _print_error(f"error: {fault}")
            sys.exit(1)
        traceback.print_exc()
        _print_error("This is a bug in omnitrain, or a case it does not know; please report it with the lines above.")
        sys.exit(1)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(our arguments, torchrun's after `--`); only `train` has the latter."""
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command != "train" or "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _print_error(text: str) -> None:
    plain = os.environ.get("NO_COLOR") or not sys.stderr.isatty()
    typer.echo(text if plain else typer.style(text, fg="red"), err=True)
