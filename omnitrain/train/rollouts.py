"""One rank's share of a rollout: weights into the engine, prompts through it, rewards as samples finish."""

from __future__ import annotations

from collections.abc import Callable

from omnitrain.data.sample import Sample
from omnitrain.errors import GateRefused
from omnitrain.rewards.facts import facts
from omnitrain.rewards.scorer import Scorer, check_skipped
from omnitrain.rollout.engine import Request, RolloutEngine, Sampling, State
from omnitrain.rollout.queue import PromptQueue
from omnitrain.train.context import Clock, Context
from omnitrain.train.prompts import PromptSource
from omnitrain.train.seeds import derive

LEAST_KEPT = 0.5
"""Share of the adapter's change that should survive a sync's cast; below it the user is warned, once."""


class Rollouts:
    """The engine and the scorer, as the loop, validation and the gates use them."""

    def __init__(self, context: Context, engine: RolloutEngine, scorer: Scorer) -> None:
        self.context = context
        self.engine = engine
        self.scorer = scorer
        self._queues = 0
        self._warned = False

    def sync(self, clock: Clock) -> dict[str, float]:
        """Give the engine the policy's current weights and wake it; returns the sync's metrics.

        Raises:
            GateRefused: g3, a tensor was streamed that the engine did not take, or one is missing.
        """
        policy, engine = self.context.policy, self.engine
        with clock.phase("wake_sleep"):
            if engine.state is State.ASLEEP:
                engine.wake(State.WEIGHTS)
        full = not engine.weights_valid
        with clock.phase("sync"):
            report = engine.load_weights(policy.stream_weights(full=full), full=full)
        expected = policy.expected_names(full)
        taken = report.pushed - report.ignored
        if taken != expected and "g3" not in self.context.recipe.gates.skip:
            raise GateRefused(
                f"g3: the engine took {len(taken)} of {len(expected)} tensors; "
                f"missing: {sorted(expected - taken)[:4]}; streamed but not taken: {sorted(report.ignored)[:4]}"
            )
        with clock.phase("wake_sleep"):
            if engine.state is not State.AWAKE:
                engine.wake(State.AWAKE)
        values = {"sync/bytes": report.bytes, "sync/delta_norm": engine.delta_norm()}
        if self.context.recipe.model.lora is not None:
            values["sync/delta_kept"] = policy.delta_kept
            if policy.delta_kept < LEAST_KEPT and not self._warned:
                self._warned = True
                self.context.console.say(
                    f"warning: {policy.delta_kept:.0%} of the adapter's change survives the cast to {self.context.recipe.model.dtype}, "
                    'so the engine samples from nearly the old weights; raise train.learning_rate, or set model.dtype = "float32"'
                )
        return values

    def sample(
        self,
        source: PromptSource,
        rows: list[int],
        key: tuple,
        sampling: Sampling,
        clock: Clock,
        *,
        version: int = 0,
        stop: Callable[[], bool] = lambda: False,
        score: bool = True,
        earlier: list[int] | None = None,
    ) -> list[Sample]:
        """Answer every row `sampling.n` times and score the answers.

        rows: indices in `source`; the position in this list is the sample's group.
        key: its first part is what the samples are for ("train", then with the step). With the run's seed and the
            row's id it fixes the noise, whoever samples.
        stop: asked between samples; once true no further prompt is begun.
        earlier: rows that the step has drawn before; groups are counted on from them.

        Returns all ranks' samples on every rank, in (group, child) order.
        """
        context, ranks = self.context, self.context.ranks
        total = len(rows) * sampling.n
        drawn = [*(earlier or []), *rows]
        before = len(drawn) - len(rows)

        def request(index: int) -> Request:
            group = before + index
            prompt = source.encode(drawn[group])
            # A step larger than the file draws a row twice; its groups must not repeat each other's noise.
            repeat = drawn[:group].count(drawn[group])
            parts = (*key, prompt.row.id, *([repeat] if repeat else []))
            # 31 bits: the engine gives child i the seed + i, and takes no larger ones.
            return Request(group, prompt, derive(context.recipe.seed, *parts) >> 31)

        self._queues += 1
        queue = PromptQueue(
            ranks,
            len(rows),
            request,
            deterministic=context.recipe.deterministic,
            name=f"prompts-{self._queues}",
            stop=stop,
        )
        mine: list[Sample] = []
        where = f"step {key[1]}" if key[0] == "train" else key[0]
        context.console.begin(where)
        with clock.phase("rollout"):
            for sample in self.engine.generate(queue.pull, sampling):
                sample.policy_version = version
                if ranks.tp_rank == 0:
                    if score:
                        told = facts(source.rows[sample.row], sample, sampling.max_new_tokens)
                        self.scorer.submit(len(mine), sample.text, told)
                    mine.append(sample)
                if score:
                    self.scorer.check()
                context.console.beat(f"sampled {len(mine)} of {total}")
        failures: dict[str, str] = {}
        if score:
            context.console.begin(where)
            with clock.phase("reward_wait"):
                failures = self._collect(mine)
        with clock.phase("exchange"):
            shares = ranks.gather((mine, failures))
        samples = [sample for share, _ in shares for sample in share]
        if score:
            example = next((failed for _, failed in shares if failed), None)
            check_skipped(sum(s.failed for s in samples), len(samples), example=example)
        return sorted(samples, key=lambda s: (s.group, s.child))

    def _collect(self, samples: list[Sample]) -> dict[str, str]:
        """Write the rewards into the samples; returns why one of the skipped failed, by reward."""
        waiting = lambda done, of: self.context.console.beat(f"scored {done} of {of}")  # noqa: E731
        scored = self.scorer.collect(waiting, max_skipped=None)
        for index, sample in enumerate(samples):
            result = scored[index]
            sample.rewards, sample.failed, sample.reward = result.values, result.skipped, result.reward
            sample.reward_failures = len(result.failed)
        return next((result.failed for result in scored.values() if result.skipped), {})
