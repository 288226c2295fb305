"""Which changes of a recipe keep a run's mathematics, so that it may be resumed with them."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from omnitrain.recipe.loader import flatten
from omnitrain.recipe.schema import Recipe
from omnitrain.recipe.sources import dotted

# Whole tables end in a dot. Memory and placement are here; what changes a gradient beyond rounding is not.
RUNTIME = (
    "name",
    "trackers.",
    "samples.",
    "profile.",
    "checkpoint.",
    "validate.",
    "gates.skip",
    "rollout.sleep",
    "rollout.gpu_memory_utilization",
    "rollout.max_concurrent",
    "rollout.max_batched_tokens",
    "rollout.enforce_eager",
    "rollout.tensor_parallel",
    "rewards[].url",
    "rewards[].api_key_env",
    "rewards[].timeout",
    "rewards[].retries",
    "rewards[].concurrency",
    "train.max_tokens_per_device",
    "train.gradient_checkpointing",
)
# The place in the rows is kept as counts of the draws that these fix: none of them can change in a run that has drawn.
DRAWS = ("seed", "data.train_weights", "data.shuffle", "data.batches", "data.modality_weights")
_LIMITS = ("train.max_steps", "train.epochs")


@dataclass(frozen=True)
class FieldChange:
    """One field that differs. A field that a recipe does not have is None."""

    path: str
    old: Any
    new: Any
    kind: Literal["mathematics", "runtime"]


def diff(old: Recipe, new: Recipe) -> list[FieldChange]:
    """The fields that differ, in the order of the schema.

    A later end (larger max_steps or epochs, or one of them removed while the other stays) is a runtime change, unless
    the learning rate follows a schedule that stretches with the run's length.
    """
    before = {dotted(path): value for path, value in flatten(old).items()}
    after = {dotted(path): value for path, value in flatten(new).items()}
    return [
        FieldChange(path, before.get(path), after.get(path), _kind(path, before.get(path), after.get(path), new))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]


def _kind(path: str, old: Any, new: Any, recipe: Recipe) -> Literal["mathematics", "runtime"]:
    if path in _LIMITS:
        later = old is not None and (new is None or new > old)
        return "runtime" if later and recipe.train.schedule == "constant" else "mathematics"
    path = re.sub(r"\[\d+\]", "[]", path)
    for field in RUNTIME:
        if path == field or (field.endswith(".") and path.startswith(field)):
            return "runtime"
    return "mathematics"
