"""The online loop: draw prompts, sample, score, update. Read `OnlineLoop.step` first."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from omnitrain import device as devices
from omnitrain.data.sample import Sample
from omnitrain.errors import GateRefused, RunError
from omnitrain.evaluation.validation import summarise
from omnitrain.rollout.engine import Sampling
from omnitrain.train.context import Clock, Context
from omnitrain.train.health import (
    LogProbs,
    agreement_metrics,
    modality_metrics,
    old_logprobs,
    reward_metrics,
    rollout_metrics,
    update_metrics,
)
from omnitrain.train.loop import Loop
from omnitrain.train.objectives import build_objective
from omnitrain.train.rollouts import Rollouts
from omnitrain.train.samples import write_samples
from omnitrain.train.state import TrainState
from omnitrain.train.updates import UpdateStats, largest, plan_updates, score_batches


@dataclass
class Drawn:
    """What a step has sampled so far, and which groups of it are trained on."""

    rows: list[int] = field(default_factory=list)
    """By group."""
    everything: list[Sample] = field(default_factory=list)
    chosen: list[Sample] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    skipped: int = 0
    draws: int = 0
    stopped: bool = False
    """The user asked to stop at once: prompts may be unanswered."""

    def add(self, rows: list[int], skipped: int, samples: list[Sample]) -> None:
        self.rows += rows
        self.everything += samples
        self.skipped += skipped
        self.draws += 1

    def choose(self, groups: list[int]) -> None:
        self.groups, wanted = groups, set(groups)
        self.chosen = [sample for sample in self.everything if sample.group in wanted]

    def metrics(self) -> dict[str, float]:
        return {
            "data/overlong_dropped": self.skipped,
            "rollout/draws": self.draws,
            "rollout/prompts_drawn": len(self.rows),
            "rollout/kept_ratio": len(self.groups) / len(self.rows),
        }


class OnlineLoop(Loop):
    """Rollout, reward, update, until the steps are done."""

    def __init__(self, context: Context, rollouts: Rollouts, state: TrainState) -> None:
        super().__init__(context, state)
        self.rollouts = rollouts
        self.facts = {"rollout/engine": rollouts.engine.name}
        self.objective = build_objective(self.recipe)
        self._trained: LogProbs = {}
        self.log_ratio_tolerance = 1e-6
        """Rounding between two passes over equal weights; gate G5 widens it by what it measures in bfloat16."""

    def step(self) -> None:
        """One step: sync, sample and score, advantages, updates, and what the step's number asks for."""
        step, clock, started = self.state.step + 1, Clock(), time.perf_counter()
        before = self.state.sampler.state_dict()
        synced = self.rollouts.sync(clock)
        version = self.state.updates
        drawn = self.draw(step, clock)
        if drawn.stopped:
            # Nothing was learned from this rollout yet: the state to save is the one before it.
            self.state.sampler.load_state_dict(before)
            self.state.save(self.context)
            raise self.context.interrupted(self.state.step)
        with clock.phase("wake_sleep"):
            self.rollouts.engine.sleep()
        values: dict[str, Any] = {"step": step, "epoch": self.state.sampler.epoch}
        values |= self.facts | {"rollout/policy_version": version}
        values |= synced | drawn.metrics() | reward_metrics(drawn.everything, self.rollouts.scorer)
        values |= self.objective.assign_advantages(drawn.chosen)
        values |= self.update(step, drawn.chosen, clock)
        values |= rollout_metrics(drawn.everything, clock.seconds["rollout"])
        values |= modality_metrics(drawn.everything, lambda s: self.source.rows[s.row].modality, self._trained)
        values["memory/peak_gib"] = devices.peak_memory_gib(self.ranks.device)
        clock.seconds["step"] = time.perf_counter() - started
        self.state.step = step
        self._finish(values, clock, lambda: self._show(drawn.chosen or drawn.everything))

    def draw(self, step: int, clock: Clock) -> Drawn:
        """The scored groups of this step. With dynamic sampling, further rows are drawn for groups that teach nothing.

        Groups are taken in the order their rows were drawn, never in the order they finished: that would favour
        prompts with short answers. Groups beyond the step's number are left out, and counted as drawn.
        """
        wanted, drawn = self.recipe.train.prompts_per_step, Drawn()
        count = wanted
        for _ in range(self.objective.most_draws):
            with clock.phase("data"):
                rows, skipped = self.source.draw(self.state.sampler, count)
            samples = self.sample(step, rows, clock, drawn.rows)
            drawn.add(rows, skipped, samples)
            drawn.stopped = self.context.stop() == "update"
            if drawn.stopped:
                break
            groups = self.objective.keep_groups(drawn.everything)
            drawn.choose([group for group in range(len(drawn.rows)) if group in groups][:wanted])
            missing = wanted - len(drawn.groups)
            if missing <= 0:
                break
            # As many as it took so far for one that teaches, within a step's worth.
            count = min(wanted, math.ceil(missing * min(len(drawn.rows) / max(1, len(groups)), 8)))
        return drawn

    def sample(self, step: int, rows: list[int], clock: Clock, earlier: list[int] | None = None) -> list[Sample]:
        """The scored groups of these rows; `earlier` are those the step has drawn before."""
        spec = self.recipe.rollout
        return self.rollouts.sample(
            self.source,
            rows,
            ("train", step),
            Sampling(spec.group_size, spec.temperature, spec.max_new_tokens),
            clock,
            version=self.state.updates,
            stop=lambda: self.context.stop_wanted() == "update",
            earlier=earlier,
        )

    def update(self, step: int, samples: list[Sample], clock: Clock) -> dict[str, float]:
        """All optimizer updates of the step; returns their metrics."""
        spec, algorithm = self.recipe.train, self.recipe.algorithm
        temperature = self.recipe.rollout.temperature
        self._trained = {}  # a step without updates compares nothing, least of all with the step before
        updates = plan_updates(
            samples,
            updates=self.state.updates_per_step,
            units=self.objective.units,
            max_tokens=spec.max_tokens_per_device,
            ranks=self.ranks,
            key=(self.recipe.seed, step),
        )
        if not updates and samples:
            raise RunError(f"step {step}: the rewards of all samples failed; see logs/")
        if not updates:
            self.context.console.say(
                f"warning: step {step}: all groups of {self.objective.most_draws} draws have equal rewards, so nothing "
                "was learned; the rows are too easy or too hard for the model, or rollout.group_size is too small"
            )
            return {"train/updates": self.state.updates}
        self.policy.module.train()
        trained = None
        if algorithm.old_logprobs == "rollout":
            for batch in (b for update in updates for b in update.batches):
                batch.old = batch.rollout(self.ranks.device)
        elif len(updates) > 1:
            with clock.phase("old_logprobs"):
                score_batches(self.policy, updates, self.source.encode, temperature)
            trained = old_logprobs(updates)
        self.context.console.begin(f"step {step}")
        with clock.phase("update"):
            collected, stepped = self._train_on(
                updates, temperature, lambda stats: self._check_first_ratio(step, stats)
            )
        # Later updates have moved the weights: the first forward alone compares with the engine's weights.
        trained = collected[0].logprobs if trained is None else trained
        self._trained = {key: values for share in self.ranks.gather(trained) for key, values in share.items()}
        values = update_metrics(updates, self.ranks.gather(collected), clock.seconds["update"])
        return values | agreement_metrics(samples, self._trained) | stepped

    def _check_first_ratio(self, step: int, stats: UpdateStats) -> None:
        """G5 in the loop: before a step's first optimizer update the current and the old policy are the same weights."""
        if self.recipe.algorithm.old_logprobs == "rollout" or "g5" in self.recipe.gates.skip:
            return
        found = largest(self.ranks.gather(stats.maxima.get("abs_log_ratio_max", 0.0)))
        if not found <= self.log_ratio_tolerance:  # NaN is refused too
            raise GateRefused(
                f"g5: step {step}: max |log ratio| is {found:.3g} before the first update, more than "
                f"{self.log_ratio_tolerance:.3g}: two passes of the trainer over the same weights disagree "
                "(dropout, another packing, or weights that changed in between)"
            )

    def validate(self) -> dict[str, float]:
        """Sync, sample the validation rows, score them, and put the engine to sleep."""
        if self.state.ema:
            with self.state.ema.swapped():
                return self._validate()
        return self._validate()

    def _validate(self) -> dict[str, float]:
        spec, rollout = self.recipe.validate_, self.recipe.rollout
        sampling = Sampling(
            1, spec.temperature or 0.0, spec.max_new_tokens or rollout.max_new_tokens, spec.top_p, spec.top_k
        )
        self.rollouts.sync(Clock())
        samples = self.rollouts.sample(self.validation, self._validation_rows, ("validation",), sampling, Clock())
        self.rollouts.engine.sleep()
        rows = self.validation.rows
        return summarise(samples, lambda s: rows[s.row].source, self.rollouts.scorer.kinds)

    def _show(self, samples: list[Sample]) -> None:
        folder = self.context.run.samples / f"step_{self.state.step}"
        shown = self.context.processing.messages
        write_samples(folder, self.context.train_rows, samples, self.recipe.samples.groups, shown)
