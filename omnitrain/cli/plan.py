"""`omnitrain plan`: what a recipe would do, before anything is started."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnitrain.cli.tables import echo_table, style
from omnitrain.errors import ModelError, RecipeError

if TYPE_CHECKING:
    from omnitrain.recipe.loader import Loaded
    from omnitrain.recipe.plan import Plan
    from omnitrain.recipe.schema import Recipe
    from omnitrain.recipe.sizes import Sizes

_COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def register(app: typer.Typer) -> None:
    """Add `plan` to the main command."""
    app.command()(plan)


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value:g} GiB: it must be more than 0")
    return value


def plan(
    recipe: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files, merged left to right.")],
    devices: Annotated[int | None, typer.Option(min=1, help="Accelerators; default: those visible here, or 1.")] = None,
    memory: Annotated[
        float | None, typer.Option(callback=_positive, help="GiB of each accelerator; default: those here.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a field; list+=item appends.")
    ] = None,
    unset: Annotated[list[str] | None, typer.Option(metavar="FIELD", help="Take a field or table out.")] = None,
) -> None:
    """Show every value with its origin, the batch arithmetic, memory by phase, and whether it fits.

    Exit code 1 if it does not fit. With neither --devices nor --memory it ends with what 1, 4 and 8 devices of 80 and
    141 GiB would say.
    """
    from omnitrain.recipe.loader import check_files, load

    loaded = load(recipe, set_ or (), unset or ())
    check_files(loaded, missing_ok=True)
    raise typer.Exit(show_plan(loaded, devices, memory, machines=devices is None and memory is None))


def show_plan(
    loaded: Loaded, devices: int | None = None, memory: float | None = None, machines: bool = False
) -> int:
    """Print the plan of a loaded recipe; returns the exit code, 1 if it does not fit. `train --dry-run` uses it too.

    machines: end with a table of common machines; then a machine without accelerators is not what is planned for.
    """
    from omnitrain.launch import visible_accelerators
    from omnitrain.recipe.plan import make_plan

    here = visible_accelerators() if devices is None or memory is None else None
    if devices is None:
        elsewhere = getattr(loaded.recipe.rollout, "tensor_parallel", 1) if machines and here.kind == "cpu" else 1
        devices = max(elsewhere, here.count)
    if memory is None and here.kind == "cuda":
        memory = _device_memory()
    check_best(loaded)
    try:
        made = make_plan(loaded.recipe, devices, memory)
    except (RecipeError, ModelError) as error:
        raise type(error)(loaded.locate(str(error))) from None
    _print(loaded, made)
    if machines and made.sizes is not None:
        typer.echo()
        _machines(loaded.recipe)
    return 1 if made.verdict == "does not fit" else 0


def check_best(loaded: Loaded) -> None:
    """RecipeError, with its position, for a checkpoint.keep_best.metric that no run writes."""
    best = loaded.recipe.checkpoint.keep_best
    if best is None:
        return
    import difflib

    from omnitrain.train.metrics import METRICS, family

    if family(best.metric) not in METRICS:
        close = difflib.get_close_matches(best.metric, METRICS, 1)
        hint = f"did you mean {close[0]}?" if close else "docs/metrics.md lists them"
        raise RecipeError(
            loaded.locate(f"checkpoint.keep_best.metric = {best.metric} is no metric of a run; {hint}")
        )


def _device_memory() -> float | None:
    """GiB of the smallest accelerator here."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=20)
    sizes = [int(line) for line in found.stdout.split() if line.isdigit()]
    return min(sizes) / 1024 if sizes else None


def _print(loaded: Loaded, plan: Plan) -> None:
    recipe = loaded.recipe
    title = f"{recipe.name}: {recipe.algorithm.kind} of {recipe.model.path} on {_count(plan.devices, 'device')}"
    typer.echo(style(title, bold=True))
    _values(loaded)
    typer.echo()
    for line in batch_lines(plan, offline=recipe.rollout is None):
        typer.echo(line)
    if plan.sizes is not None:
        typer.echo(_prompts(recipe, plan.sizes))
    if plan.phases:
        typer.echo()
        _memory(plan)
        typer.echo(
            f"host memory per device: about {plan.host.total:.0f} GiB; checkpoints on disk: {_gib(plan.disk_gib)}"
        )
    if plan.sleep is not None:
        resolved = f" (auto -> {plan.sleep})" if recipe.rollout.sleep == "auto" and plan.sleep != "auto" else ""
        cache = f"; KV cache of {plan.kv_tokens:,} tokens per engine" if plan.kv_tokens is not None else ""
        typer.echo(f"rollout.sleep = {recipe.rollout.sleep}{resolved}{cache}")
    for warning in plan.warnings:
        typer.echo(style(f"note: {warning}", fg="yellow"))
    if plan.verdict is not None:
        largest = max(phase.total for phase in plan.phases)
        text = f"{plan.verdict}: {_gib(largest)} of {plan.memory_gib:g} GiB, {_margin(plan, largest)}"
        typer.echo(style(text, fg=_COLOURS[plan.verdict]))
    if plan.knob is not None:
        typer.echo(f"to make it fit: {plan.knob}")


def batch_lines(plan: Plan, offline: bool) -> list[str]:
    """The arithmetic of steps, updates and sequences in words."""
    batch = plan.batch
    responses = "" if offline else f" x {batch.group_size} responses = {batch.sequences_per_step} sequences"
    again = f", drawn up to {batch.most_draws} times" if batch.most_draws > 1 else ""
    lines = [f"a step: {_count(batch.prompts_per_step, batch.noun)}{responses}{again}"]
    each = "" if offline else f" x {batch.group_size} = {batch.sequences_per_update} sequences"
    lines.append(
        f"updates a step: {batch.updates_per_step}, each of {_count(batch.prompts_per_update, batch.noun)}{each}"
    )
    if batch.precomputed:
        lines.append("before step 1: one forward over all training and validation rows, for the reference's log-probs")
    if batch.rows is not None:
        lines.append(f"an epoch: {batch.rows} rows = {batch.steps_per_epoch:.4g} steps")
    if batch.steps is None:
        lines.append("the run: its steps depend on the training rows, which are not here")
    else:
        lines.append(f"the run: {_count(batch.steps, 'step')}, {_count(batch.updates, 'update')}")
    return lines


def _prompts(recipe: Recipe, sizes: Sizes) -> str:
    """How much of the longest prompt one picture, one video and one second of sound take at most."""
    from omnitrain.recipe.plan import media_tokens

    most = media_tokens(recipe, sizes)
    return (
        f"a prompt: at most {recipe.data.max_prompt_tokens} tokens; a picture takes up to {most['picture']} of them, "
        f"a video of {recipe.data.video.max_frames} frames {most['video']}, a second of sound "
        f"{sizes.sound_tokens_per_second:g}"
    )


def _machines(recipe: Recipe) -> None:
    """What the plan would say on machines that are common."""
    from omnitrain.recipe.plan import on_common_machines

    rows = []
    for plan, parallel in on_common_machines(recipe):
        peak = max(plan.phases, key=lambda phase: phase.total)
        machine = f"{plan.devices} x {plan.memory_gib:g} GiB"
        machine += f" (tensor_parallel {parallel})" if parallel is not None else ""
        rows.append((machine, plan.verdict, _gib(peak.total), peak.name, plan.knob or ""))
    echo_table(("machine", "verdict", "peak", "in phase", "to make it fit"), rows)


def _values(loaded: Loaded) -> None:
    """Every field, its resolved value and its origin."""
    from omnitrain.recipe.loader import flatten
    from omnitrain.recipe.sources import dotted, literal

    rows = []
    for path, value in flatten(loaded.recipe).items():
        shown = "-" if value is None else literal(str(value) if isinstance(value, Path) else value, limit=80)
        rows.append((dotted(path), shown, loaded.origins_by_path[path]))
    echo_table(("field", "value", "origin"), rows, dim=lambda row: row[2] == "default")


def _memory(plan: Plan) -> None:
    rows = []
    for part in dict.fromkeys(name for phase in plan.phases for name, _ in phase.parts):
        sizes = [dict(phase.parts).get(part) for phase in plan.phases]
        rows.append((part, *("" if size is None else _number(size) for size in sizes)))
    rows.append(("total", *(_number(phase.total) for phase in plan.phases)))
    echo_table(("GiB per device", *(phase.name for phase in plan.phases)), rows, right=True)


def _margin(plan: Plan, largest: float) -> str:
    """How far the largest phase is from the device's memory, in digits that show it."""
    spare = plan.memory_gib - largest
    if spare < 0:
        return f"{_gib(-spare)} too much"
    if plan.verdict == "does not fit":
        return "and the KV cache holds no sequence of full length"
    return f"{_gib(spare)} spare"


def _gib(size: float) -> str:
    return f"{size:.1f} GiB" if size >= 1 else f"{size * 1024:.3g} MiB"


def _number(size: float) -> str:
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
