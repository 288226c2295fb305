"""Words about a run that goes on but learns nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STEPS = 3
"""So many steps in a row without a difference in any group are worth a word."""


class Notices:
    """Watches the steps' metrics and speaks once about each thing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._equal = 0
        self._told = False
        self._steps = 0
        self._moved = False

    def step(self, values: dict[str, Any]) -> None:
        """Take in the metrics of a training step; those of the start (step 0) hold nothing to watch."""
        if "train/grad_norm" not in values:
            return
        self._steps += 1
        self._moved = self._moved or values["train/grad_norm"] != 0
        self._equal = self._equal + 1 if values.get("train/zero_std_ratio") == 1 else 0
        if self._equal == STEPS and not self._told:
            self._told = True
            self._say(
                f"warning: in each group of a step all rewards were equal, for {STEPS} steps: nothing is learned; "
                "see docs/rewards.md"
            )

    def end(self) -> None:
        """The run has made its last step."""
        if self._steps and not self._moved:
            self._say("warning: the gradient was zero in every step: the update was not exercised")
