"""`omnitrain train`: check, plan, start the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnitrain.errors import ModelError, RecipeError, UsageError

if TYPE_CHECKING:
    from omnitrain.recipe.loader import Loaded
    from omnitrain.rundir import Prepared

_Recipes = Annotated[
    list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files, merged left to right.", show_default=False)
]
_Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, in TOML syntax; list+=item appends."),
]
_Unsets = Annotated[
    list[str], typer.Option("--unset", metavar="FIELD", help="Take a field or table out of the recipe.")
]
_Devices = Annotated[int | None, typer.Option(min=1, help="Processes on this node; default one per accelerator.")]
_RunDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Default runs/<name>. An existing run is resumed.")]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Move an existing run aside and start again.")]
_AllowChange = Annotated[bool, typer.Option("--allow-change", help="Resume although the recipe's mathematics changed.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and start nothing.")]


def register(app: typer.Typer) -> None:
    """Add `train` to the main command."""
    app.command(
        options_metavar="[OPTIONS]", epilog="Arguments after -- go to torchrun: -- --nnodes 2 --rdzv-endpoint HOST:PORT"
    )(train)


def train(
    context: typer.Context,
    recipe: _Recipes,
    sets: _Sets = [],
    unsets: _Unsets = [],
    devices: _Devices = None,
    run_dir: _RunDir = None,
    fresh: _Fresh = False,
    allow_change: _AllowChange = False,
    dry_run: _DryRun = False,
) -> None:
    """Train a recipe, or resume it: run again on the same directory, it goes on from its last checkpoint.

    Ctrl-C finishes the step, saves and exits with 130; a second one stops at once.
    """
    from omnitrain.cli.plan import check_best
    from omnitrain.launch import launch, nodes_token, outer_torchrun, visible_accelerators
    from omnitrain.recipe.loader import check_files, load, resolved
    from omnitrain.rundir import RunDir

    loaded = load(recipe, sets, unsets)
    check_files(loaded, missing_ok=dry_run)
    if dry_run:
        from omnitrain.cli.plan import show_plan

        raise typer.Exit(show_plan(loaded, devices))
    check_best(loaded)
    _check_model(loaded)
    final = resolved(loaded.recipe)
    run = RunDir(run_dir or Path("runs") / final.name)
    if fresh or not run.resumes():
        _check_start(loaded)
    options = {"fresh": fresh, "allow_change": allow_change}
    if outer_torchrun():
        if devices or context.obj:
            raise UsageError(
                "--devices and arguments for torchrun have no effect inside a torchrun of your own; leave them out"
            )
        raise typer.Exit(_as_rank(loaded, final, run, options))
    found = visible_accelerators()
    count = devices or found.count
    if found.kind != "cpu" and count > found.count:
        raise UsageError(f"--devices {count}: this machine shows {found.count} {found.kind} devices")
    torchrun_args = list(context.obj or [])
    if set_by_us := [word for word in torchrun_args if word.replace("_", "-").startswith("--nproc-per-node")]:
        raise UsageError(f"{set_by_us[0]} after --: say --devices N before it")
    token = nodes_token(torchrun_args)
    show_summary(loaded, count, several_nodes=token is not None)
    prepared = run.prepare(final, token=token, **options)
    show_prepared(prepared, run.path)
    if token is None and _finished(final, prepared, run):
        raise typer.Exit(0)
    raise typer.Exit(launch(run, count, torchrun_args, kind=found.kind, deterministic=final.deterministic))


def _finished(recipe, prepared: Prepared, run) -> bool:
    """Whether the run's last step is saved already: then says so, and that it ended well, without starting a rank."""
    from omnitrain.recipe.plan import total_steps
    from omnitrain.recipe.rows import count_rows
    from omnitrain.rundir import write_exit

    if prepared.step is None:
        return False
    rows = sum(count_rows(file.path) for file in recipe.data.train_files) if recipe.train.epochs else None
    total = total_steps(recipe, rows)
    if prepared.step < total:
        return False
    typer.echo(f"finished already: {prepared.step} of {total} steps; train.max_steps or train.epochs sets a later end")
    write_exit(run, 0, "")
    return True


def _as_rank(loaded: Loaded, recipe, run, options: dict[str, bool]) -> int:
    """Inside an outer torchrun: rank 0 prepares the run directory, the others wait for it, then each is a rank."""
    from omnitrain.launch import environment, outer_token, visible_accelerators

    os.environ.update(environment(visible_accelerators().kind, recipe.deterministic))
    if int(os.environ["RANK"]):
        run.wait_prepared(outer_token())
    else:
        show_summary(loaded, int(os.environ["WORLD_SIZE"]))
        show_prepared(run.prepare(recipe, token=outer_token(), **options), run.path)
    from omnitrain.train.worker import main

    return main(run.path)


def show_summary(loaded: Loaded, devices: int, several_nodes: bool = False) -> None:
    """Print what is about to run. On several nodes the number of all devices is only known once they have met."""
    from omnitrain.cli.plan import _device_memory, batch_lines
    from omnitrain.launch import visible_accelerators
    from omnitrain.recipe.plan import make_plan

    recipe = loaded.recipe
    memory = _device_memory() if visible_accelerators().kind == "cuda" else None
    try:
        plan = make_plan(recipe, devices, memory)
    except (RecipeError, ModelError) as error:
        if several_nodes and "tensor_parallel" in str(error):
            return
        raise type(error)(loaded.locate(str(error))) from None
    where = "devices of this node" if several_nodes else "device" if devices == 1 else "devices"
    typer.echo(f"{recipe.name}: {recipe.algorithm.kind} of {recipe.model.path} on {devices} {where}")
    for line in batch_lines(plan, offline=recipe.rollout is None):
        typer.echo(f"  {line}")
    for warning in plan.warnings:
        if "--memory" not in warning:  # `plan` asks for it where there is no accelerator; here it has no effect
            typer.echo(f"  note: {warning}")
    if plan.verdict in ("tight", "does not fit"):
        knob = f"; to make it fit: {plan.knob}" if plan.knob else ""
        typer.echo(f"  memory, by the plan's estimate: {plan.verdict}{knob}")


def show_prepared(prepared: Prepared, path: Path) -> None:
    """Print the run directory and what was found in it."""
    typer.echo(f"run directory: {path}")
    for note in prepared.notes:
        typer.echo(f"  {note}")


def _check_model(loaded: Loaded) -> None:
    """The model's directory is there, or a hub name's snapshot is in the local cache. Its content is the ranks' to judge."""
    path = Path(loaded.recipe.model.path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(loaded.locate(f"model.path = {path} has no config.json: it is not a checkpoint directory"))
        return
    if path.exists():
        raise ModelError(loaded.locate(f"model.path = {path} is a file; name the checkpoint's directory"))
    from omnitrain.recipe.sizes import hub_name

    name = str(loaded.recipe.model.path)
    if not hub_name(name):
        raise ModelError(loaded.locate(f"model.path = {name}: no such directory"))
    if _cached(name):
        return
    raise ModelError(
        loaded.locate(
            f"model.path = {name} is neither a directory nor a model in the local hub cache; "
            f"download it (`hf download {name}`), or name its directory"
        )
    )


def _check_start(loaded: Loaded) -> None:
    """RecipeError, with its position, for a model.init_from or model.adapter that no rank could start from."""
    from omnitrain.starts import problem

    if found := problem(loaded.recipe):
        raise RecipeError(loaded.locate(found))


def _cached(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return any((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
