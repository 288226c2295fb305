"""The same recipe, small enough for minutes on a CPU: what `omnitrain rehearse` runs. Every substitution is said."""

from pathlib import Path
from typing import Any

from omnitrain.recipe.loader import resolved, validated
from omnitrain.recipe.schema import Recipe

STEPS = 2
PROMPTS = 4
GROUP = 4
NEW_TOKENS = 16
MODEL = "model"
DATA = "data"


def rehearsal(recipe: Recipe, workdir: Path) -> tuple[Recipe, list[str]]:
    """The recipe to rehearse with, and one line for each substituted field.

    The model becomes `workdir/model` (the caller writes the family's tiny checkpoint there). The rows stay the
    recipe's own where their file is here; a missing file becomes `workdir/data/<name>` (the caller writes synthetic
    rows there). Paths are absolute.
    """
    data = resolved(recipe).plain()
    said: list[str] = []

    def put(path: str, value: Any, why: str = "") -> None:
        *tables, name = path.split(".")
        table = data
        for part in tables:
            table = table.setdefault(part, {})
        old = table.get(name)
        if old == value:
            return
        if value is None:
            del table[name]
        else:
            table[name] = value
        said.append(f"{path}: {_text(old)} -> {_text(value)}" + (f" ({why})" if why else ""))

    put("name", f"{recipe.name}-rehearsal")
    put("model.path", str((workdir / MODEL).absolute()), "a tiny random model of the family")
    put("model.dtype", "float32")
    put("model.attention", "sdpa", "runs on a CPU")
    put("model.init_from", None, "another size")
    for field in ("train", "validation"):
        path = data["data"].get(field)
        if path is not None and not Path(path).exists():
            put(
                f"data.{field}",
                str((workdir / DATA / Path(path).name).absolute()),
                "synthetic rows: the file is not here",
            )
    _train(recipe, put)
    if recipe.rollout is not None:
        put("rollout.group_size", min(GROUP, recipe.rollout.group_size))
        put("rollout.max_new_tokens", min(NEW_TOKENS, recipe.rollout.max_new_tokens))
        if recipe.rollout.engine == "vllm_omni":
            put("rollout.tensor_parallel", 1)
    if recipe.data.validation is not None:
        put("validate.every", 1)
        put("validate.max_rows", min(PROMPTS, recipe.validate_.max_rows or PROMPTS))
    if recipe.rollout is not None and recipe.validate_.max_new_tokens is not None:
        put("validate.max_new_tokens", min(NEW_TOKENS, recipe.validate_.max_new_tokens))
    put("checkpoint.every", 1)
    if recipe.algorithm.online:
        put("samples.every", 1)
    put("trackers.wandb", None, "a rehearsal stays off the network")
    return validated(data), said


def _train(recipe: Recipe, put) -> None:
    train = recipe.train
    prompts = min(PROMPTS, train.prompts_per_step)
    put("train.max_steps", STEPS)
    put("train.epochs", None)
    put("train.prompts_per_step", prompts)
    if train.prompts_per_update is not None:
        # Several updates a step stay several: they take another path through the ratio.
        several = train.prompts_per_update < train.prompts_per_step
        put("train.prompts_per_update", prompts // 2 if several and prompts % 2 == 0 else prompts)
    put("train.warmup_updates", min(1, train.warmup_updates))


def _text(value: Any) -> str:
    return "not set" if value is None else str(value)
