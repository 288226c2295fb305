"""What the online and the offline loop share: the steps' frame around what each of them does in one."""

from __future__ import annotations

from typing import Any, Callable

from omnitrain.train.context import Clock, Context
from omnitrain.train.prompts import PromptSource
from omnitrain.train.state import TrainState

OVERHEAD = ("sync", "wake_sleep", "reward_wait", "exchange", "logging")


class Loop:
    """Steps until the last one; a subclass says what a step and a validation are."""

    facts: dict[str, Any] = {}
    """Metrics that stand in every line."""

    def __init__(self, context: Context, state: TrainState) -> None:
        self.context, self.state = context, state
        self.recipe, self.ranks, self.policy = context.recipe, context.ranks, context.policy
        overlong = self.recipe.data.overlong
        self.source = PromptSource(context.train_rows, context.processing, context.ranks, overlong)
        self.validation = None
        if context.validation_rows is not None:
            self.validation = PromptSource(context.validation_rows, context.processing, context.ranks, overlong)
            self._validation_rows = self.validation.first(self.recipe.validate_.max_rows)
        self._carried: dict[str, float] = {}

    def step(self) -> None:
        """One step; it ends in `_finish`."""
        raise AssertionError("a subclass's")

    def validate(self) -> dict[str, float]:
        """Metrics of the validation rows."""
        raise AssertionError("a subclass's")

    def run(self) -> None:
        """Train until the last step. Raises Interrupted when the user asked to stop; what was trained is saved."""
        if not self.state.resumed and self.recipe.validate_.at_start and self.validation:
            self.context.log({"step": 0} | self.facts | self.validate())
        self.context.check_start(self.state.step + 1)
        while self.state.step < self.state.total_steps:
            self.step()
        self.context.finish(self.state.step, self.state.updates)

    def _finish(self, values: dict[str, Any], clock: Clock, show: Callable[[], None] | None = None) -> None:
        """Validate if due, log, `show` samples if due, save if due, stop if asked."""
        step, last = self.state.step, self.state.step == self.state.total_steps
        every = self.recipe.validate_.every
        # Asked to stop at once, saving comes first: whoever sent the SIGTERM may not wait for a validation.
        hurry = self.context.stop() == "update" and not last
        if self.validation and not hurry and (last or (every and step % every == 0)):
            with clock.phase("validate"):
                values |= self.validate()
        clock.seconds |= self._carried
        overhead = sum(clock.seconds.get(phase, 0.0) for phase in OVERHEAD)
        values |= clock.metrics() | {"time/overhead_share": overhead / clock.seconds["step"]}
        after = Clock()
        with after.phase("logging"):
            self.context.log(values)
            if show and self.ranks.main and (last or step == 1 or step % self.recipe.samples.every == 0):
                show()
        stop = self.context.stop()
        every = self.recipe.checkpoint.every
        if last or stop or (every and step % every == 0):
            with after.phase("checkpoint"):
                self.state.save(self.context, values)
        self._carried = after.seconds
        if stop and not last:
            raise self.context.interrupted(step)
