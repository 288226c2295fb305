"""What a checkpoint holds beside the weights, and the optimizer: all that a run needs to go on exactly."""

from __future__ import annotations

from typing import Any

from omnitrain.data.sampler import PromptSampler
from omnitrain.train.context import Context
from omnitrain.train.optim import build_optimizer


class TrainState:
    """Step and update counters, optimizer, schedule and the place in the rows."""

    def __init__(self, context: Context) -> None:
        recipe = context.recipe
        spec = recipe.train
        self.total_steps = context.total_steps()
        self.updates_per_step = spec.prompts_per_step // (spec.prompts_per_update or spec.prompts_per_step)
        parameters = [parameter for _, parameter in context.policy.trainable()]
        self.optimizer, self.scheduler = build_optimizer(parameters, spec, self.total_steps * self.updates_per_step)
        self.sampler = PromptSampler(len(context.train_rows), spec.prompts_per_step, recipe.seed, recipe.data.shuffle)
        self.step = 0
        self.updates = 0
        self.resumed = False
        """Whether a checkpoint was loaded. One of step 0 comes after the validation at the start."""

    def save(self, context: Context, metrics: dict[str, Any] | None = None) -> None:
        """Write the state after the current step. Resuming from it repeats nothing and skips nothing."""
        extra = {"step": self.step, "updates": self.updates, "sampler": self.sampler.state_dict()}
        context.checkpointer.save(
            self.step, context.policy.module, self.optimizer, self.scheduler, extra, metrics=metrics or {}
        )

    def resume(self, context: Context) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        path = context.checkpointer.latest()
        if path is None:
            return False
        extra = context.checkpointer.load(path, context.policy.module, self.optimizer, self.scheduler)
        self.step, self.updates = extra["step"], extra["updates"]
        self.sampler.load_state_dict(extra["sampler"])
        self.resumed = True
        context.console.say(f"resumed after step {self.step} from {path.name}")
        return True
