"""What `omnitrain bench RECIPE --determinism` runs and says: the same steps with `deterministic` on, on again, and off.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from omnitrain.recipe.schema import Recipe

MODULE = "omnitrain.train.repeat"
"""What each rank runs."""
RESULT = "determinism.json"


@dataclass(frozen=True)
class Repeated:
    """One run's outcome."""

    deterministic: bool
    steps: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    weights: list[str]
    """A digest of the trained weights of each rank."""

    @property
    def seconds(self) -> float:
        """Median time of a step, the first left out: it compiles and allocates."""
        times = [line["time/step"] for line in self.steps]
        return median(times[1:] or times)


def repeated_recipe(recipe: Recipe, deterministic: bool, steps: int) -> Recipe:
    """The recipe for a few steps, without validation, gates and trackers: what is measured is the training alone."""
    from omnitrain.recipe.loader import resolved, validated

    data = resolved(recipe).plain()
    data["deterministic"] = deterministic
    data["data"].pop("validation", None)
    data["validate"] = {}
    data["train"] |= {"max_steps": steps}
    data["train"].pop("epochs", None)
    data["checkpoint"] = {}
    data["trackers"] = {}
    data.pop("profile", None)
    data["gates"] = {"skip": list(recipe.gate_names)}
    return validated(data)


def difference(one: Repeated, other: Repeated, comparable) -> str | None:
    """Where two runs differ first, in words; None if they are equal in every bit.

    comparable: `omnitrain.train.metrics.comparable`, what of a step's metrics must be equal.
    """
    for ours, theirs in zip(one.steps, other.steps, strict=True):
        ours, theirs = comparable(ours), comparable(theirs)
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                return f"step {ours['step']}: {name} is {ours.get(name)} and {theirs.get(name)}"
    return None if one.weights == other.weights else "the trained weights, with equal metrics"


def lines(off: Repeated, on: tuple[Repeated, Repeated], found: str | None) -> list[str]:
    """The result in text."""
    with_it = min(run.seconds for run in on)
    equal = "equal in every bit: metrics and trained weights" if found is None else f"different: {found}"
    return [
        f"deterministic = false   {off.seconds:8.3f} s a step",
        f"deterministic = true    {on[0].seconds:8.3f} s, again {on[1].seconds:.3f} s",
        f"cost: {with_it / off.seconds:.2f} times the time of a step",
        f"two runs with it: {equal}",
    ]
