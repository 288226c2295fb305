"""Rewards: a response and its row in, one finite number out. Imports neither torch nor a reward's libraries."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

ENDPOINTS = ("http", "unified_reward", "genrm_ocr")
"""Kinds that ask a server: they wait in one thread instead of occupying a process each."""


def load_reward(spec: Any) -> Callable[[str, dict], float]:
    """The `score(response, row)` of a `[[rewards]]` table: anything with `kind` and that kind's fields.

    A kind's module has `score`, or `load(spec)` where it has options. Raises what importing it raises; the scorer
    turns that into an error that names the recipe's field.
    """
    module = importlib.import_module(f"omnitrain.rewards.{spec.kind}")
    if hasattr(module, "warm_up"):
        module.warm_up()
    return module.load(spec) if hasattr(module, "load") else module.score


def reward_names(specs: Sequence[Any]) -> list[str]:
    """The rewards' names in metrics and samples: the kind, or the function's name; repeated ones get "_2", "_3"."""
    names: list[str] = []
    for spec in specs:
        base = spec.function.rpartition(":")[2] if spec.kind == "python" else spec.kind
        name, count = base, 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names


def fields(spec: Any) -> dict[str, Any]:
    """A table's fields as plain data: what another process needs to load the reward."""
    return spec.model_dump() if hasattr(spec, "model_dump") else dict(vars(spec))
