"""What the online and the offline loop share: the steps' frame around what each of them does in one."""

from __future__ import annotations

from typing import Any, Callable

from omnitrain.data.files import RowFiles
from omnitrain.train.context import Clock, Context
from omnitrain.train.optim import clipped_step
from omnitrain.train.profile import Profiler
from omnitrain.train.prompts import PromptSource
from omnitrain.train.state import TrainState
from omnitrain.train.updates import Update, UpdateStats, run_update

OVERHEAD = ("sync", "wake_sleep", "reward_wait", "exchange", "logging")


class Loop:
    """Steps until the last one; a subclass says what a step and a validation are."""

    objective: Any
    """What turns packed log-probs into a loss (train/objectives.py)."""
    facts: dict[str, Any] = {}
    """Metrics that stand in every line."""

    def __init__(self, context: Context, state: TrainState) -> None:
        self.context, self.state = context, state
        self.recipe, self.ranks, self.policy = context.recipe, context.ranks, context.policy
        self.source = self._prompts(context.train_rows)
        self.validation = None
        if context.validation_rows is not None:
            spec = self.recipe.validate_
            self.validation = self._prompts(context.validation_rows)
            self._validation_rows = self.validation.first(spec.max_rows, spec.balance)
        self._carried: dict[str, float] = {}

    def _prompts(self, rows: RowFiles) -> PromptSource:
        """The rows as prompts; a subclass may leave out more of them."""
        return PromptSource(rows, self.context.processing, self.ranks, self.recipe.data.overlong)

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
        context = self.context
        with Profiler(self.recipe.profile, context.run.profile, self.ranks, context.console.say) as profiler:
            while self.state.step < self.state.total_steps:
                with profiler.step(self.state.step + 1):
                    self.step()
        self.context.finish(self.state.step, self.state.updates)

    def _train_on(
        self, updates: list[Update], temperature: float, first: Callable[[UpdateStats], None] | None = None
    ) -> tuple[list[UpdateStats], dict[str, float]]:
        """Forward, backward and optimizer step of each update; this rank's statistics, and what to log of the steps.

        first: called between the first update's backward pass and its step, where the weights are still the old ones.
        """
        collected, norms, rate = [], [], 0.0
        self.policy.module.train()
        for index, update in enumerate(updates):
            stats = run_update(self.policy, self.objective, update, self.source.encode, temperature, self.ranks.world)
            if index == 0 and first:
                first(stats)
            kept = update.units
            if self.objective.rejects:
                kept = sum(self.ranks.gather(stats.sums["units"]))
                self._leave_out(update.units, kept)
            rate = self.state.scheduler.get_last_lr()[0]  # of this update: the step moves it on
            norms.append(clipped_step(self.state.optimizer, self.state.scheduler, self.recipe.train.grad_clip, kept > 0))
            self.state.updates += 1
            if self.state.ema:
                self.state.ema.update()
            collected.append(stats)
            self.context.console.beat(f"update {index + 1} of {len(updates)}")
        return collected, {
            "train/grad_norm": sum(norms) / len(norms),
            "train/learning_rate": rate,
            "train/updates": self.state.updates,
        }

    def _leave_out(self, planned: float, kept: float) -> None:
        """Gradients were divided by the planned units; make it the kept ones, which only the forward pass could tell."""
        for _, parameter in self.policy.trainable():
            if parameter.grad is not None and kept:
                parameter.grad.mul_(planned / kept)

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
