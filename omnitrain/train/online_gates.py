"""The gates of an online run: engine and trainer are the same model, fed the same tokens, and rewards work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from omnitrain.data.sample import Sample
from omnitrain.errors import GateRefused
from omnitrain.recipe.gates import GATES
from omnitrain.rewards.facts import facts
from omnitrain.rollout.engine import Sampling, State
from omnitrain.train.context import Clock, Context
from omnitrain.train.gates import Gates, Verdict
from omnitrain.train.health import LogProbs, compare
from omnitrain.train.online import OnlineLoop
from omnitrain.train.rollouts import Rollouts

PROBE_TOKENS = 64
# (stop below, warn below). In float32 nothing but rounding may differ; bfloat16 routes some tokens to other experts.
PEARSON = {"float32": (0.9999, 0.9999), "bfloat16": (0.99, 0.995)}
# Largest mean |difference of log-probs|. Pearson does not see a shift or a scale, such as another temperature.
GAP = {"float32": 1e-3, "bfloat16": 0.1}


class OnlineGates(Gates):
    """The probe is a few prompts of every kind in the data, answered once by the engine."""

    words = GATES

    def __init__(self, context: Context, rollouts: Rollouts, loop: OnlineLoop) -> None:
        super().__init__(context, loop)
        self.rollouts, self.engine = rollouts, rollouts.engine
        self.temperature = context.recipe.rollout.temperature
        self._probe: list[Sample] = []
        self.pearson_stop, self.pearson_warn = PEARSON[context.recipe.model.dtype]
        self.largest_gap = GAP[context.recipe.model.dtype]

    def run(self) -> list[Verdict]:
        """All gates; the engine is asleep afterwards."""
        verdicts = super().run()
        if self.engine.state is not State.ASLEEP:
            self.engine.sleep()
        return verdicts

    def _begin(self) -> None:
        if "g3" in self.context.recipe.gates.skip:
            self.rollouts.sync(Clock())

    def _checks(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("g3", self.g3_adapters_bound),
            ("g7", self.g7_prompt_ids),
            # Before g6: where the trainer disagrees with itself, it cannot agree with the engine.
            ("g5", self.g5_ratio),
            ("g6", self.g6_agreement),
            ("g1", self.g1_sync_reaches_engine),
            ("g2", self.g2_sleep_keeps_output),
            ("g9", self.g9_rewards),
            ("g10", self.g10_checkpoint),
        ]

    def probe(self, *, greedy: bool = False, fresh: bool = False) -> list[Sample]:
        """Probe prompts answered by the engine as it is now, without rewards."""
        if self._probe and not greedy and not fresh:
            return self._probe
        spec = self.context.recipe.rollout
        tokens = min(PROBE_TOKENS, spec.max_new_tokens)
        sampling = Sampling(1, 0.0, tokens) if greedy else Sampling(min(4, spec.group_size), self.temperature, tokens)
        key = ("probe", "greedy" if greedy else "sampled")
        samples = self.rollouts.sample(self.source, self.probed.rows, key, sampling, Clock(), score=False)
        if not greedy:
            self._probe = samples
        return samples

    @torch.no_grad()
    def trainer_logprobs(self, samples: list[Sample]) -> LogProbs:
        """The policy's log-probs of these samples, on every rank."""
        own: LogProbs = {}
        for batch in self._batches(samples):
            logp, _ = self.policy.logprobs(batch.inputs(self.source.encode), self.temperature)
            if not batch.filler:
                parts = logp.float().cpu().split([len(s.tokens) for s in batch.samples])
                own |= {(s.group, s.child): part.tolist() for s, part in zip(batch.samples, parts)}
        merged: LogProbs = {}
        for share in self.ranks.gather(own):
            merged |= share
        return merged

    def g1_sync_reaches_engine(self) -> str:
        """Perturb every trained parameter, sync: the engine's output must change and equal the trainer's."""
        before = [(s.tokens, s.logprobs) for s in self.probe()]
        kept = [(p, p.detach().clone()) for _, p in self.policy.trainable()]
        watched = self.engine.delta_norm()
        try:
            self._perturb()
            self.rollouts.sync(Clock())
            moved = abs(self.engine.delta_norm() - watched)
            changed = self.probe(fresh=True)
            found = compare(changed, self.trainer_logprobs(changed))
        finally:
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)
            self._probe = []
            self.rollouts.sync(Clock())
        after = compare(self.probe(), self.trainer_logprobs(self.probe()))
        if moved == 0 or before == [(s.tokens, s.logprobs) for s in changed]:
            raise GateRefused(
                f"a perturbing sync moved the engine's watched weights by {moved:.3g}, which must be above 0, and its "
                "samples must change: the engine keeps stale weights"
            )
        for what, numbers in (("a perturbing sync", found), ("syncing the original weights again", after)):
            if not self._agree(numbers):
                raise GateRefused(
                    f"engine and trainer after {what}: Pearson {numbers['pearson']:.5f}, at least {self.pearson_stop} "
                    f"is needed; mean |dlogp| {numbers['abs_mean']:.2g}, at most {self.largest_gap} is allowed"
                )
        return f"perturbed weights: moved {moved:.3g}, Pearson {found['pearson']:.6f}; restored: {after['pearson']:.6f}"

    def _agree(self, found: dict[str, float]) -> bool:
        """Whether the numbers of `compare` are within the dtype's limits; NaN is not."""
        return found["pearson"] >= self.pearson_stop and found["abs_mean"] <= self.largest_gap

    @torch.no_grad()
    def _perturb(self) -> None:
        generator = torch.Generator().manual_seed(1234)
        for _, parameter in self.policy.trainable():
            full = torch.randn(parameter.shape, generator=generator)
            scale = 0.02 / math.sqrt(max(1, parameter.shape[-1]) / 64) if parameter.ndim > 1 else 0.01
            noise = (full * scale).to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                from torch.distributed.tensor import distribute_tensor

                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.add_(noise)

    def g2_sleep_keeps_output(self) -> str:
        """Greedy answers before a sleep and after waking and syncing: tokens and log-probs, to the first other token.

        Log-probs show what tokens hide; and where another batch turns a near tie of bfloat16 over, they stay close.
        """
        before = self.probe(greedy=True)
        self.engine.sleep()
        self.rollouts.sync(Clock())
        after = self.probe(greedy=True)
        gaps: dict[str, list[float]] = {}
        for old, new in zip(before, after):
            share = gaps.setdefault(self.probed.kinds[old.row], [])
            for a, b, x, y in zip(old.tokens, new.tokens, old.logprobs, new.logprobs):
                share.append(abs(x - y))
                if a != b:
                    break
        means = {name: sum(share) / len(share) for name, share in sorted(gaps.items())}
        equal = sum(old.tokens == new.tokens for old, new in zip(before, after))
        text = f"{equal} of {len(before)} greedy answers equal after a sleep and a wake"
        if bad := [name for name, mean in means.items() if not mean <= self.largest_gap]:
            raise GateRefused(
                f"{text}; mean |dlogp| of {', '.join(f'{name} is {means[name]:.3g}' for name in bad)}, "
                f"at most {self.largest_gap} is allowed"
            )
        return f"{text}, mean |dlogp| at most {max(means.values()):.2g}"

    def g3_adapters_bound(self) -> str:
        """Every tensor the policy streams is taken by the engine, and every adapter found modules to sit on."""
        self.rollouts.sync(Clock())
        lora = self.context.recipe.model.lora
        if lora is not None and self.policy.lora_count == 0:
            raise GateRefused(f"LoRA targets {lora.module_names()} matched 0 modules; at least 1 is needed")
        count = len(self.policy.expected_names(lora is None))
        adapters = f"{self.policy.lora_count} adapters merged, " if lora is not None else ""
        return f"{adapters}{count} tensors streamed and taken"

    def g5_ratio(self) -> str:
        """The update's forward against the log-prob pass, same weights and packing: max |log ratio| within rounding."""
        batches = self._batches(self.probe())
        inputs = [batch.inputs(self.source.encode) for batch in batches]
        with torch.no_grad():
            old = [self.policy.logprobs(x, self.temperature)[0] for x in inputs]
        self.policy.module.train()
        largest = noise = 0.0
        for x, reference in zip(inputs, old):
            logp, _ = self.policy.logprobs(x, self.temperature, entropy=True)
            difference = (logp.detach() - reference).abs().max().item()
            # max() would drop a NaN.
            largest = max(largest, difference if math.isfinite(difference) else math.inf)
            # FSDP keeps the root whole until a backward pass: without one, later forwards would use stale weights.
            (logp.sum() * 0.0).backward()
        self.loop.state.optimizer.zero_grad(set_to_none=True)
        if self.context.recipe.model.dtype != "float32":
            noise = self._packing_noise(inputs, self.temperature)
            self.loop.log_ratio_tolerance = max(1e-6, 3 * noise)
        largest = max(self.ranks.gather(largest))
        tolerance = max(self.ranks.gather(self.loop.log_ratio_tolerance))
        self.loop.log_ratio_tolerance = tolerance
        if largest > tolerance:
            raise GateRefused(
                f"max |log ratio| of two passes over the same weights is {largest:.3g}, at most {tolerance:.3g} is allowed"
            )
        return f"max |log ratio| {largest:.3g}, allowed {tolerance:.3g}"

    def g6_agreement(self) -> str:
        """Engine and trainer log-probs of the same tokens, by kind of row: Pearson of probabilities and mean |difference|."""
        samples = self.probe()
        trained = self.trainer_logprobs(samples)
        by_kind: dict[str, list[Sample]] = {}
        for sample in samples:
            by_kind.setdefault(self.probed.kinds[sample.row], []).append(sample)
        found = {name: compare(share, trained) for name, share in sorted(by_kind.items())}
        text = "; ".join(f"{n}: Pearson {f['pearson']:.6f}, |dlogp| {f['abs_mean']:.2g}" for n, f in found.items())
        if bad := [name for name, f in found.items() if not self._agree(f)]:
            raise GateRefused(
                f"{', '.join(bad)} {'disagree' if len(bad) > 1 else 'disagrees'}: {text}; Pearson of at least "
                f"{self.pearson_stop} and |dlogp| of at most {self.largest_gap} are needed"
            )
        if any(f["pearson"] < self.pearson_warn for f in found.values()):
            text += f" (below {self.pearson_warn}: watch rollout/pearson)"
        return text

    def g7_prompt_ids(self) -> str:
        """Prompt ids as the engine expanded them equal the processor's."""
        checked: Counter[str] = Counter()
        for sample in self.probe():
            prompt, kind = self.source.encode(sample.row), self.probed.kinds[sample.row]
            if sample.prompt_ids != prompt.ids:
                pairs = list(zip(sample.prompt_ids, prompt.ids))
                first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                raise GateRefused(
                    f"row {prompt.row.id} ({kind}): the engine saw {len(sample.prompt_ids)} prompt ids, "
                    f"the processor wrote {len(prompt.ids)}; first difference at position {first}"
                )
            checked[kind] += 1
        return "equal prompt ids: " + ", ".join(f"{n} {k}" for k, n in sorted(checked.items()))

    def g9_rewards(self) -> str:
        """Every reward gives one finite number, in time, for a canary answer to each probe row of its sources.

        A reward whose failures `on_failure` tolerates must still work for one of them.
        """
        rows = [self.source.rows[i] for i in self._rows_to_score()]
        sample = self.probe()[0]
        limit = max(len(sample.tokens), self.context.recipe.rollout.max_new_tokens)
        scorer = self.rollouts.scorer
        found = scorer.canary([facts(row, sample, limit) for row in rows], sample.text)
        failures = []
        for (name, report), spec in zip(found.items(), self.context.recipe.rewards, strict=True):
            if report["failures"] and (spec.on_failure == "fail" or not report["values"]):
                failures += [f"{name}: {line}" for line in report["failures"]]
        asked = {name: len(report["values"]) + len(report["failures"]) for name, report in found.items()}
        if failures:
            raise GateRefused(
                f"{len(failures)} of {sum(asked.values())} canary scores failed, 0 are allowed; {failures[0]}"
            )
        return "; ".join(
            f"{name}: {len(report['values'])} of {asked[name]} rows, {min(report['values']):.3g} to "
            f"{max(report['values']):.3g}, in {report['seconds']:.2g} s"
            if report["values"]
            else f"{name}: scores none of these rows"
            for name, report in found.items()
        )

    def _rows_to_score(self) -> list[int]:
        """The probe's rows, and one for each reward that scores none of them."""
        scorer, rows = self.rollouts.scorer, list(self.probed.rows)
        done = {reward for name in self.probed.sources.values() for reward in scorer.rewards_of(name)}
        for row, name in enumerate(self.source.rows.column("source") if len(done) < len(scorer.names) else ()):
            if new := set(scorer.rewards_of(name)) - done:
                rows.append(row)
                done |= new
        return rows
