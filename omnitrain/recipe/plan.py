"""What a run would do, from arithmetic alone: steps and updates, memory of each phase, and whether it fits."""

import itertools
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from omnitrain.errors import RecipeError
from omnitrain.models.qwen3_omni import spec as qwen3_omni
from omnitrain.recipe import memory
from omnitrain.recipe.checks import check_profile, check_rows
from omnitrain.recipe.loader import validated
from omnitrain.recipe.memory import Phase
from omnitrain.recipe.rows import count_rows, modalities
from omnitrain.recipe.schema import Recipe
from omnitrain.recipe.sizes import Sizes

FAMILIES = {"qwen3_omni": qwen3_omni}

# Allocators fragment and estimates err: a run that needs more than this share of the device is called tight.
COMFORTABLE = 0.95

# The machines of the table at the end of a plan.
DEVICES = (1, 4, 8)
MEMORIES = (80.0, 141.0)


@dataclass(frozen=True)
class Batch:
    """The counting (decision: a step is one rollout, an update is one optimizer step)."""

    rows: int | None
    """Training rows; None when the file is not here."""
    prompts_per_step: int
    prompts_per_update: int
    group_size: int
    """Responses per prompt; 1 without a rollout."""
    steps: int | None
    """Steps of the whole run; None if it depends on rows that are not here."""
    engines: int
    """Rollout engines; 0 without a rollout."""
    most_draws: int = 1
    """Rollouts of one step at most: dynamic sampling draws again for groups that teach nothing."""
    noun: str = "prompt"
    """What a step draws: prompts, or preference pairs."""
    precomputed: bool = False
    """The reference's log-probs of all rows are computed before step 1."""

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // self.prompts_per_update

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def sequences_per_update(self) -> int:
        return self.prompts_per_update * self.group_size

    @property
    def updates(self) -> int | None:
        return None if self.steps is None else self.steps * self.updates_per_step

    @property
    def steps_per_epoch(self) -> float | None:
        return None if self.rows is None else self.rows / self.prompts_per_step


@dataclass(frozen=True)
class Plan:
    """What `omnitrain plan` shows. Sizes in GiB unless said otherwise."""

    devices: int
    memory_gib: float | None
    batch: Batch
    sizes: Sizes | None
    """None when the model's configuration is not at hand; then there are no phases and no verdict."""
    phases: tuple[Phase, ...]
    """Per device."""
    host: Phase | None
    """Main memory, per device."""
    disk_gib: float | None
    """The checkpoints that are kept, and the one being written, with whatever else a run keeps."""
    sleep: str | None
    """rollout.sleep with "auto" resolved; None without an engine that sleeps."""
    kv_tokens: int | None
    """Tokens that an engine's KV cache holds."""
    verdict: str | None
    """"fits", "tight" or "does not fit"; None when the memory or the model's sizes are not known."""
    knob: str | None
    """What to change so that it fits."""
    warnings: tuple[str, ...]


def training_rows(recipe: Recipe) -> int | None:
    """Rows of all training files; None where one of them is not here."""
    paths = [file.path for file in recipe.data.train_files]
    return sum(map(count_rows, paths)) if all(path.is_file() for path in paths) else None


def total_steps(recipe: Recipe, rows: int | None) -> int | None:
    """Steps of the run: max_steps, or the whole steps that the epochs come to, whichever is less."""
    limits = []
    if recipe.train.max_steps is not None:
        limits.append(recipe.train.max_steps)
    if recipe.train.epochs is not None:
        if rows is None:
            return None
        limits.append(max(1, recipe.train.epochs * rows // recipe.train.prompts_per_step))
    return min(limits)


def make_plan(recipe: Recipe, devices: int, memory_gib: float | None = None) -> Plan:
    """Plan a recipe for a number of devices of `memory_gib` each.

    Raises RecipeError for settings that no run on these devices could have, ModelError for a model directory that is
    not one, DataError for a data file that is not parquet. Reads no more than config.json and the parquet footer.
    """
    if devices < 1:
        raise RecipeError(f"--devices {devices}: at least one device is needed")
    sizes = FAMILIES[recipe.model.family].sizes(recipe.model.path)
    _check_parallel(recipe, devices, sizes)
    _check_targets(recipe, sizes)
    _check_length(recipe, sizes)
    check_micro_batch(recipe)
    check_rows(recipe)
    batch = _batch(recipe, devices, training_rows(recipe))
    check_profile(recipe, batch.steps)
    plan = Plan(devices, memory_gib, batch, sizes, (), None, None, None, None, None, None, ())
    if sizes is not None:
        plan = _with_memory(recipe, plan)
        if plan.verdict in ("tight", "does not fit"):
            plan = replace(plan, knob=_knob(recipe, plan))
    return replace(plan, warnings=tuple(_warnings(recipe, plan)))


def _check_parallel(recipe: Recipe, devices: int, sizes: Sizes | None) -> None:
    parallel = getattr(recipe.rollout, "tensor_parallel", 1)
    if devices % parallel:
        near = sorted({max(parallel, devices // parallel * parallel), (devices // parallel + 1) * parallel})
        fits = [str(n) for n in range(1, devices + 1) if devices % n == 0 and (sizes is None or sizes.heads % n == 0)]
        elsewhere = ", or plan another machine by `--devices 4 --memory 80`," if devices == 1 and 4 % parallel == 0 else ""
        raise RecipeError(
            f"rollout.tensor_parallel = {parallel} does not divide the number of devices, {devices}; use "
            f"--devices {' or '.join(str(n) for n in near)}{elsewhere} or set rollout.tensor_parallel to {' or '.join(fits)}"
        )
    if sizes is not None and sizes.heads % parallel:
        raise RecipeError(
            f"rollout.tensor_parallel = {parallel} does not divide the model's {sizes.heads} attention heads "
            f"({sizes.source}); use a divisor of {sizes.heads}"
        )


def _check_targets(recipe: Recipe, sizes: Sizes | None) -> None:
    if recipe.model.lora is None or sizes is None:
        return
    names = recipe.model.lora.module_names()
    known = [*sizes.projections, *(sizes.expert_projections if sizes.experts else ())]
    unknown = [name for name in names if name.rsplit(".", 1)[-1] not in known]
    if unknown or not names:
        sets = ", ".join(f'"{name}"' for name in FAMILIES[recipe.model.family].LORA_TARGETS)
        raise RecipeError(
            f"model.lora.targets = {json.dumps(recipe.model.lora.targets)} "
            + (f"matches no module: {', '.join(unknown)}" if unknown else "is empty")
            + f"; the text decoder has {', '.join(known)}, and the named sets are {sets}"
        )


def _check_length(recipe: Recipe, sizes: Sizes | None) -> None:
    """Positions the model was not made for have no meaning, and the engine refuses them."""
    if sizes is None:
        return
    prompt, longest = recipe.data.max_prompt_tokens, sizes.max_positions
    wanted = [("", 0)]
    if recipe.rollout is not None:
        wanted += [(" + rollout.max_new_tokens", recipe.rollout.max_new_tokens)]
        wanted += [(" + validate.max_new_tokens", recipe.validate_.max_new_tokens or 0)]
    elif recipe.data.max_response_tokens:
        wanted += [(" + data.max_response_tokens", recipe.data.max_response_tokens)]
    name, new = max(wanted, key=lambda pair: pair[1])
    if prompt + new > longest:
        values = f"{prompt} + {new} = {prompt + new}" if new else f"{prompt}"
        raise RecipeError(
            f"data.max_prompt_tokens{name} = {values} is more than the model's {longest} positions "
            f"(max_position_embeddings, {sizes.source}); lower {'one of them' if new else 'it'}"
        )


def check_micro_batch(recipe: Recipe) -> None:
    """RecipeError if the longest sequence a rollout may make is more than one micro-batch holds."""
    if recipe.rollout is None:
        return
    prompt, new, most = recipe.data.max_prompt_tokens, recipe.rollout.max_new_tokens, recipe.train.max_tokens_per_device
    if prompt + new > most:
        raise RecipeError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {prompt} + {new} = {prompt + new} is more than "
            f"train.max_tokens_per_device = {most}: a sequence of that length fits no micro-batch; set "
            f"train.max_tokens_per_device to {prompt + new} or more, or lower one of the other two"
        )


def _batch(recipe: Recipe, devices: int, rows: int | None) -> Batch:
    train, rollout, algorithm = recipe.train, recipe.rollout, recipe.algorithm
    return Batch(
        rows=rows,
        prompts_per_step=train.prompts_per_step,
        prompts_per_update=train.prompts_per_update or train.prompts_per_step,
        group_size=rollout.group_size if rollout else 1,
        steps=total_steps(recipe, rows),
        engines=devices // getattr(rollout, "tensor_parallel", 1) if rollout else 0,
        most_draws=algorithm.max_generation_batches if algorithm.kind == "dapo" and algorithm.dynamic_sampling else 1,
        noun="pair" if algorithm.kind == "dpo" else "prompt",
        precomputed=algorithm.kind == "dpo" and algorithm.reference == "precomputed",
    )


def _with_memory(recipe: Recipe, plan: Plan) -> Plan:
    need = memory.Need(recipe, plan.sizes, plan.devices, plan.memory_gib)
    sleep = None
    if need.engine:
        sleep = recipe.rollout.sleep
        if sleep == "auto" and plan.memory_gib is not None:
            sleep = "kv" if need.train("kv").total <= COMFORTABLE * plan.memory_gib else "weights"
    phases = need.phases(sleep)
    verdict = None
    if plan.memory_gib is not None:
        share = max(phase.total for phase in phases) / plan.memory_gib
        enough = need.kv_tokens() is None or need.kv_tokens() >= need.longest
        verdict = "does not fit" if share > 1 or not enough else "tight" if share > COMFORTABLE else "fits"
    return replace(
        plan,
        phases=phases,
        host=need.host(),
        disk_gib=need.disk(),
        sleep=sleep,
        kv_tokens=need.kv_tokens(),
        verdict=verdict,
    )


def _knob(recipe: Recipe, plan: Plan) -> str:
    """The first single change that makes the plan fit, found by planning again with it."""
    for changes, text in _candidates(recipe, plan):
        devices = changes.pop("devices", plan.devices)
        try:
            changed = _changed(recipe, changes)
            _check_parallel(changed, devices, plan.sizes)
        except (RecipeError, ValueError):
            continue
        if _with_memory(changed, replace(plan, devices=devices)).verdict == "fits":
            return text
    return "no single setting makes it fit: use more devices, or devices with more memory"


def _candidates(recipe: Recipe, plan: Plan):
    """Changes in the order of what they cost: those that keep the mathematics and the speed first."""
    train, rollout = recipe.train, recipe.rollout
    if plan.sleep in ("off", "kv"):
        yield {"rollout.sleep": "weights"}, 'set rollout.sleep = "weights"'
    if not train.gradient_checkpointing:
        yield {"train.gradient_checkpointing": True}, "set train.gradient_checkpointing = true"
    if plan.sleep is not None:
        now = rollout.gpu_memory_utilization
        steps = [round(i / 100, 2) for i in range(95, 5, -5)]
        for value in [step for step in steps if step < now] + [step for step in reversed(steps) if step > now]:
            word = "lower" if value < now else "raise"
            yield {"rollout.gpu_memory_utilization": value}, f"{word} rollout.gpu_memory_utilization to {value}"
    tokens = train.max_tokens_per_device // 2
    while tokens >= memory.longest(recipe) * (2 if recipe.algorithm.kind == "dpo" else 1):
        yield {"train.max_tokens_per_device": tokens}, f"lower train.max_tokens_per_device to {tokens}"
        tokens //= 2
    if plan.sleep is not None:
        parallel = rollout.tensor_parallel * 2
        while parallel <= plan.devices:
            yield {"rollout.tensor_parallel": parallel}, f"raise rollout.tensor_parallel to {parallel}"
            parallel *= 2
    devices = plan.devices * 2
    while devices <= 64:
        yield {"devices": devices}, f"use {devices} devices"
        devices *= 2


def _changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    data = recipe.plain()
    for path, value in changes.items():
        table, name = path.split(".")
        data[table][name] = value
    return validated(data)


def _warnings(recipe: Recipe, plan: Plan):
    batch, train = plan.batch, recipe.train
    data = recipe.data
    for field, paths in (("train", [file.path for file in data.train_files]), ("validation", data.validation_files)):
        for path in paths:
            if not path.exists():
                yield f"data.{field} does not exist here: {path}"
    if batch.rows is not None and batch.rows < batch.prompts_per_step:
        yield (
            f"train.prompts_per_step = {batch.prompts_per_step} is more than the {batch.rows} training rows: "
            "a step repeats rows"
        )
    longest = memory.longest(recipe)
    if recipe.algorithm.kind == "dpo":
        # Both answers of a pair follow the prompt, in one micro-batch.
        if 2 * longest > train.max_tokens_per_device:
            response = " + data.max_response_tokens" if data.max_response_tokens else ""
            yield (
                f"2 x (data.max_prompt_tokens{response}) = {2 * longest} is more than train.max_tokens_per_device = "
                f"{train.max_tokens_per_device}: a pair of that length counts as overlong"
            )
    elif recipe.rollout is None and longest > train.max_tokens_per_device:
        response = f" + data.max_response_tokens = {longest}" if data.max_response_tokens else f" = {longest}"
        yield (
            f"data.max_prompt_tokens{response} is more than train.max_tokens_per_device = "
            f"{train.max_tokens_per_device}: a prompt of that length would stop the run"
        )
    yield from _media_warnings(recipe, plan)
    if batch.engines > batch.prompts_per_step:
        yield f"{batch.engines} engines share {batch.prompts_per_step} prompts a step: some have nothing to do"
    if batch.sequences_per_update < plan.devices:
        yield f"{plan.devices} devices share {batch.sequences_per_update} sequences an update: some have nothing to do"
    if plan.kv_tokens is not None and recipe.rollout is not None:
        whole = plan.kv_tokens // longest
        wanted = min(recipe.rollout.max_concurrent, batch.sequences_per_step // max(1, batch.engines))
        if 0 < whole < wanted and plan.verdict != "does not fit":
            yield f"the KV cache holds {whole} sequences of full length; an engine could work on {wanted}"
    if plan.sizes is None:
        yield f"no config.json for model.path = {recipe.model.path} here, so memory is not planned"
    if plan.memory_gib is None and plan.sizes is not None:
        yield "no device memory given, so the figures above are for the smallest KV cache; add --memory GIB for a verdict on them"
    if train.warmup_updates and batch.updates is not None and train.warmup_updates >= batch.updates:
        yield f"train.warmup_updates = {train.warmup_updates} covers all {batch.updates} updates of the run"
    if recipe.data.validation is None and recipe.validate_.every is not None:
        yield "validate.every has no effect without data.validation"


def media_tokens(recipe: Recipe, sizes: Sizes) -> dict[str, int]:
    """Most tokens of one "picture" and one "video", by the recipe's bounds on pixels and frames."""
    picture, video = recipe.data.image, recipe.data.video
    return sizes.media_tokens(picture.max_pixels, video.max_pixels, video.max_frames)


def _media_warnings(recipe: Recipe, plan: Plan):
    """Bounds of the recipe's own that leave no room for the rest of a prompt, where the rows hold such media.

    The default bounds say nothing about the files, which may all be small.
    """
    if plan.sizes is None:
        return
    held = modalities([file.path for file in recipe.data.train_files])
    fields = {"picture": ("image", "data.image.max_pixels"), "video": ("video", "data.video.max_pixels or max_frames")}
    for name, most in media_tokens(recipe, plan.sizes).items():
        kind, bounds = fields[name]
        own = {"max_pixels", "max_frames"} & getattr(recipe.data, kind).model_fields_set
        if own and kind in held and most >= recipe.data.max_prompt_tokens:
            yield (
                f"a {name} may take {most} tokens, and data.max_prompt_tokens = {recipe.data.max_prompt_tokens}: lower "
                f"{bounds}, or longer prompts are left out"
            )


def on_common_machines(recipe: Recipe) -> list[tuple[Plan, int | None]]:
    """Plans for machines of 1, 4 and 8 devices, each with the tensor_parallel that had to be lowered to divide them."""
    plans = []
    for devices, memory_gib in itertools.product(DEVICES, MEMORIES):
        parallel, changed, lowered = getattr(recipe.rollout, "tensor_parallel", 1), recipe, None
        if devices % parallel:
            lowered = math.gcd(devices, parallel)
            changed = _changed(recipe, {"rollout.tensor_parallel": lowered})
        plans.append((make_plan(changed, devices, memory_gib), lowered))
    return plans
