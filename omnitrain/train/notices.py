"""Words about a run that goes on but learns nothing, or nothing of one modality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

STEPS = 3
"""So many steps in a row without a difference in any group are worth a word."""

MODALITY_STEPS = 10
"""The same of one modality, counting the steps that hold it: of it a step may hold a single group."""

APART, TOGETHER = 0.95, 0.98
"""Pearson of engine and trainer: one modality below the first is worth a word while another is above the second."""


class Notices:
    """Watches the steps' metrics and speaks once about each thing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._equal = 0
        self._told: set[str] = set()
        self._steps = 0
        self._moved = False
        self._flat: Counter[str] = Counter()
        self._apart: Counter[str] = Counter()

    def step(self, values: dict[str, Any]) -> None:
        """Take in the metrics of a training step; those of the start (step 0) hold nothing to watch."""
        if "train/grad_norm" not in values:
            return
        self._steps += 1
        self._moved = self._moved or values["train/grad_norm"] != 0
        # An overlong penalty teaches even so.
        penalty = bool(values.get("train/overlong_penalty"))
        self._equal = self._equal + 1 if values.get("train/zero_std_ratio") == 1 and not penalty else 0
        if self._equal == STEPS:
            self._once(
                "equal",
                f"in each group of a step all rewards were equal, for {STEPS} steps: nothing is learned; see "
                "docs/rewards.md",
            )
        if not penalty:
            self._watch_rewards(_by_modality(values, "zero_std_ratio"))
        self._watch_agreement(_by_modality(values, "pearson"))

    def _watch_rewards(self, ratios: dict[str, float]) -> None:
        for name, ratio in ratios.items():
            others = [other for key, other in ratios.items() if key != name]
            self._flat[name] = self._flat[name] + 1 if ratio == 1 and min(others, default=1) < 1 else 0
            if self._flat[name] == MODALITY_STEPS:
                self._once(
                    f"flat {name}",
                    f"{name}: in each group all rewards were equal, for {MODALITY_STEPS} steps: nothing is learned "
                    "there, but elsewhere; see docs/rewards.md",
                )

    def _watch_agreement(self, found: dict[str, float]) -> None:
        best = max((value for value in found.values() if value >= TOGETHER), default=None)
        for name, value in found.items():
            self._apart[name] = self._apart[name] + 1 if best is not None and value < APART else 0
            if self._apart[name] == STEPS:
                self._once(
                    f"apart {name}",
                    f"{name}: Pearson of engine and trainer is {value:.3f}, elsewhere up to {best:.3f}, for {STEPS} "
                    "steps; see `omnitrain explain g6`",
                )

    def _once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._say(f"warning: {text}")

    def end(self) -> None:
        """The run has made its last step."""
        if self._steps and not self._moved:
            self._say("warning: the gradient was zero in every step: the update was not exercised")


def _by_modality(values: dict[str, Any], measure: str) -> dict[str, float]:
    """One measure of modality/<modality>/<measure>, by modality; those that are not numbers are left out."""
    parts = {name.split("/")[1]: value for name, value in values.items() if _is(name, measure)}
    return {name: value for name, value in parts.items() if value is not None and value == value}


def _is(name: str, measure: str) -> bool:
    return name.startswith("modality/") and name.endswith(f"/{measure}")
