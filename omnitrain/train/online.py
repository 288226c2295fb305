"""The online loop: draw prompts, sample, score, update. Read `OnlineLoop.step` first."""

from __future__ import annotations

import time
from typing import Any

import torch

from omnitrain import device as devices
from omnitrain.data.sample import Sample
from omnitrain.errors import GateRefused, RunError
from omnitrain.evaluation.validation import summarise
from omnitrain.rollout.engine import Sampling
from omnitrain.train.context import Clock, Context
from omnitrain.train.health import agreement_metrics, old_logprobs, reward_metrics, rollout_metrics, update_metrics
from omnitrain.train.loop import Loop
from omnitrain.train.objectives import GspoObjective
from omnitrain.train.optim import clipped_step
from omnitrain.train.rollouts import Rollouts
from omnitrain.train.samples import write_samples
from omnitrain.train.state import TrainState
from omnitrain.train.updates import UpdateStats, largest, plan_updates, run_update, score_batches


class OnlineLoop(Loop):
    """Rollout, reward, update, until the steps are done."""

    def __init__(self, context: Context, rollouts: Rollouts, state: TrainState) -> None:
        super().__init__(context, state)
        self.rollouts = rollouts
        self.facts = {"rollout/engine": rollouts.engine.name}
        self.objective = GspoObjective(self.recipe.algorithm)
        self.log_ratio_tolerance = 1e-6
        """Rounding between two passes over equal weights; gate G5 widens it by what it measures in bfloat16."""

    def step(self) -> None:
        """One step: sync, sample and score, advantages, updates, and what the step's number asks for."""
        step, clock, started = self.state.step + 1, Clock(), time.perf_counter()
        before = self.state.sampler.state_dict()
        with clock.phase("data"):
            rows, skipped = self.source.draw(self.state.sampler, self.recipe.train.prompts_per_step)
        synced = self.rollouts.sync(clock)
        version = self.state.updates
        samples = self.sample(step, rows, clock)
        if self.context.stop() == "update":
            # Nothing was learned from this rollout yet: the state to save is the one before it.
            self.state.sampler.load_state_dict(before)
            self.state.save(self.context)
            raise self.context.interrupted(self.state.step)
        with clock.phase("wake_sleep"):
            self.rollouts.engine.sleep()
        values: dict[str, Any] = {"step": step, "epoch": self.state.sampler.epoch}
        values |= self.facts | {"rollout/policy_version": version}
        values |= {"data/overlong_dropped": skipped} | synced
        values |= self.objective.assign_advantages(samples) | reward_metrics(samples, self.rollouts.scorer)
        values |= self.update(step, samples, clock)
        values |= rollout_metrics(samples, clock.seconds["rollout"])
        values["memory/peak_gib"] = devices.peak_memory_gib(self.ranks.device)
        clock.seconds["step"] = time.perf_counter() - started
        self.state.step = step
        self._finish(values, clock, lambda: self._show(samples))

    def sample(self, step: int, rows: list[int], clock: Clock) -> list[Sample]:
        """The scored groups of this step's rows."""
        spec = self.recipe.rollout
        return self.rollouts.sample(
            self.source,
            rows,
            ("train", step),
            Sampling(spec.group_size, spec.temperature, spec.max_new_tokens),
            clock,
            version=self.state.updates,
            stop=lambda: self.context.stop_wanted() == "update",
        )

    def update(self, step: int, samples: list[Sample], clock: Clock) -> dict[str, float]:
        """All optimizer updates of the step; returns their metrics."""
        spec, algorithm = self.recipe.train, self.recipe.algorithm
        temperature = self.recipe.rollout.temperature
        updates = plan_updates(
            samples,
            updates=self.state.updates_per_step,
            units=self.objective.units,
            max_tokens=spec.max_tokens_per_device,
            ranks=self.ranks,
            key=(self.recipe.seed, step),
        )
        if not updates:
            raise RunError(f"step {step}: the rewards of all samples failed; see logs/")
        self.policy.module.train()
        trained = None
        if algorithm.old_logprobs == "rollout":
            for batch in (b for update in updates for b in update.batches):
                old = [x for sample in batch.samples for x in sample.logprobs]
                batch.old = torch.tensor(old, device=self.ranks.device)
        elif len(updates) > 1:
            with clock.phase("old_logprobs"):
                score_batches(self.policy, updates, self.source.encode, temperature)
            trained = old_logprobs(updates)
        collected, norms = [], []
        self.context.console.begin(f"step {step}")
        with clock.phase("update"):
            for index, update in enumerate(updates):
                stats = run_update(
                    self.policy, self.objective, update, self.source.encode, temperature, self.ranks.world
                )
                if index == 0:
                    self._check_first_ratio(step, stats)
                rate = self.state.scheduler.get_last_lr()[0]  # of this update: the step moves it on
                norms.append(clipped_step(self.state.optimizer, self.state.scheduler, spec.grad_clip))
                self.state.updates += 1
                collected.append(stats)
                self.context.console.beat(f"update {index + 1} of {len(updates)}")
        values = update_metrics(updates, self.ranks.gather(collected), clock.seconds["update"])
        # Later updates have moved the weights: the first forward alone compares with the engine's weights.
        trained = collected[0].logprobs if trained is None else trained
        return (
            values
            | agreement_metrics(samples, self.ranks.gather(trained))
            | {
                "train/grad_norm": sum(norms) / len(norms),
                "train/learning_rate": rate,
                "train/updates": self.state.updates,
            }
        )

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
        spec, rollout = self.recipe.validate_, self.recipe.rollout
        sampling = Sampling(
            1, spec.temperature or 0.0, spec.max_new_tokens or rollout.max_new_tokens, spec.top_p, spec.top_k
        )
        self.rollouts.sync(Clock())
        samples = self.rollouts.sample(self.validation, self._validation_rows, ("validation",), sampling, Clock())
        self.rollouts.engine.sleep()
        rows = self.validation.rows
        return summarise(samples, lambda s: rows[s.row].source, self.rollouts.scorer.names)

    def _show(self, samples: list[Sample]) -> None:
        folder = self.context.run.samples / f"step_{self.state.step}"
        shown = self.context.processing.messages
        write_samples(folder, self.context.train_rows, samples, self.recipe.samples.groups, shown)
