"""What a checkpoint holds beside the weights, and the optimizer: all that a run needs to go on exactly."""

from __future__ import annotations

from typing import Any

from omnitrain.data.sampler import Sampler, build_sampler
from omnitrain.train.context import Context
from omnitrain.train.ema import Ema
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
        self.sampler = run_sampler(context)
        self.ema = Ema(context.policy.module, spec.ema) if spec.ema else None
        """The moving average of the trained weights, with `train.ema`."""
        self.step = 0
        self.updates = 0
        self.resumed = False
        """Whether a checkpoint was loaded. One of step 0 comes after the validation at the start."""

    def save(self, context: Context, metrics: dict[str, Any] | None = None) -> None:
        """Write the state after the current step. Resuming from it repeats nothing and skips nothing."""
        extra = {"step": self.step, "updates": self.updates, "sampler": self.sampler.state_dict()}
        averages = None
        if self.ema:
            extra["ema"], averages = self.ema.updates, self.ema.averages
        context.checkpointer.save(
            self.step,
            context.policy.module,
            self.optimizer,
            self.scheduler,
            extra,
            metrics=metrics or {},
            averages=averages,
        )

    def resume(self, context: Context) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        path = context.checkpointer.latest()
        if path is None:
            return False
        averages = self.ema.averages if self.ema else None
        extra = context.checkpointer.load(path, context.policy.module, self.optimizer, self.scheduler, averages)
        if self.ema and "ema" in extra:
            self.ema.updates = extra["ema"]
        elif self.ema:  # train.ema is new in this run
            self.ema.restart()
            context.console.say("the moving average begins at the resumed weights: the checkpoint holds none")
        self.step, self.updates = extra["step"], extra["updates"]
        self.sampler.load_state_dict(extra["sampler"])
        self.resumed = True
        context.console.say(f"resumed after step {self.step} from {path.name}")
        return True


def run_sampler(context: Context) -> Sampler:
    """What the run draws its rows from. DPO never draws a pair whose responses are the same text."""
    recipe, rows = context.recipe, context.train_rows
    ties = set(rows.ties()) if recipe.algorithm.kind == "dpo" else set()
    files = [[row for row in part if row not in ties] for part in rows.ranges] if ties else rows.ranges
    return build_sampler(
        files,
        per_step=recipe.train.prompts_per_step,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        weights=recipe.data.train_weights,
        modalities=rows.modalities if recipe.data.batches == "modality" else None,
        modality_weights=recipe.data.modality_weights,
    )
