"""The gates: before the first step, does this run train what it seems to?

Every gate compares two numbers that must agree and names both when they do not. They run on a few
real prompts of the run, one group per modality, under a forked random state, and leave the weights
bit for bit as they were: skipping a gate changes no metric.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.distributed.tensor import DTensor

from omnitrain import device as devices
from omnitrain.data.sample import Sample
from omnitrain.errors import DataError, GateRefused, OmnitrainError
from omnitrain.recipe.gates import GATES as INFO
from omnitrain.rewards.facts import facts
from omnitrain.rollout.engine import Sampling, State
from omnitrain.train.context import Clock, Context
from omnitrain.train.health import LogProbs, compare
from omnitrain.train.online import OnlineLoop
from omnitrain.train.prompts import PromptSource
from omnitrain.train.rollouts import Rollouts
from omnitrain.train.updates import MicroBatch, plan_updates

PROBE_TOKENS = 64
PROBE_ROWS_PER_MODALITY = 2
PROBE_SCAN = 256
# (stop below, warn below). In float32 nothing but rounding may differ; bfloat16 routes some tokens to other experts.
PEARSON = {"float32": (0.9999, 0.9999), "bfloat16": (0.99, 0.995)}
# Largest mean |difference of log-probs|. Pearson does not see a shift or a scale, such as another temperature.
GAP = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass
class Verdict:
    """What one gate found."""

    gate: str
    ok: bool
    detail: str
    seconds: float = 0.0
    skipped: bool = False


class Gates:
    """Runs the gates of an online run in order; the first that fails stops it."""

    def __init__(self, context: Context, rollouts: Rollouts, loop: OnlineLoop) -> None:
        self.context, self.rollouts, self.loop = context, rollouts, loop
        self.policy, self.engine, self.ranks = context.policy, rollouts.engine, context.ranks
        self.source: PromptSource = loop.source
        self.temperature = context.recipe.rollout.temperature
        self._probe: list[Sample] = []
        self._rows: list[int] = []
        self.pearson_stop, self.pearson_warn = PEARSON[context.recipe.model.dtype]
        self.largest_gap = GAP[context.recipe.model.dtype]

    def run(self) -> list[Verdict]:
        """All gates. Writes gates.json. Raises GateRefused with the gate, both numbers and the likely causes."""
        verdicts: list[Verdict] = []
        with devices.forked_rng(self.ranks.device):
            if "g3" in self.context.recipe.gates.skip:
                self.rollouts.sync(Clock())
            for gate, check in self._checks():
                verdict = self._one(gate, check)
                verdicts.append(verdict)
                self._report(verdicts)
                if not verdict.ok:
                    causes = "".join(f"\n  - {cause}" for cause in INFO[gate].causes)
                    raise GateRefused(f"{gate} ({INFO[gate].title}): {verdict.detail}\nlikely causes:{causes}")
        if self.engine.state is not State.ASLEEP:
            self.engine.sleep()
        return verdicts

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

    def _one(self, gate: str, check: Callable[[], str]) -> Verdict:
        if gate in self.context.recipe.gates.skip:
            return Verdict(gate, True, "skipped by gates.skip", skipped=True)
        started = time.perf_counter()
        try:
            detail, ok = check(), True
        except GateRefused as refused:
            detail, ok = str(refused).removeprefix(f"{gate}: "), False
        # One rank that refuses stops all, with the first refusal's words.
        details = self.ranks.gather((ok, detail))
        refusal = next((text for good, text in details if not good), None)
        return Verdict(gate, refusal is None, refusal or detail, time.perf_counter() - started)

    def _report(self, verdicts: list[Verdict]) -> None:
        if not self.ranks.main:
            return
        last = verdicts[-1]
        mark = "skip" if last.skipped else "ok" if last.ok else "REFUSED"
        self.context.console.say(f"gate {last.gate:<4}{mark:<8}{last.detail.splitlines()[0]}  ({last.seconds:.1f}s)")
        (self.context.run.path / "gates.json").write_text(json.dumps([asdict(v) for v in verdicts], indent=1))

    # ---- the probe: a few prompts of every modality in the data, answered once

    def probe_rows(self) -> list[int]:
        """Some rows of each modality that fit, in file order: from all of the file, whose parts may be of one kind each.

        Raises DataError when none fits: gates over nothing would all pass.
        """
        if self._rows:
            return self._rows
        rows, found = self.source.rows, {}
        for index in sorted(random.Random(0).sample(range(len(rows)), min(PROBE_SCAN, len(rows)))):
            modality = rows[index].modality
            if found.get(modality, 0) < PROBE_ROWS_PER_MODALITY and self.source.fitting([index]):
                found[modality] = found.get(modality, 0) + 1
                self._rows.append(index)
        if not self._rows:
            raise DataError(
                f"{rows.path}: none of {min(PROBE_SCAN, len(rows))} rows is within data.max_prompt_tokens; raise it"
            )
        return self._rows

    def probe(self, *, greedy: bool = False, fresh: bool = False) -> list[Sample]:
        """Probe prompts answered by the engine as it is now, without rewards."""
        if self._probe and not greedy and not fresh:
            return self._probe
        spec = self.context.recipe.rollout
        tokens = min(PROBE_TOKENS, spec.max_new_tokens)
        sampling = Sampling(1, 0.0, tokens) if greedy else Sampling(min(4, spec.group_size), self.temperature, tokens)
        key = ("probe", "greedy" if greedy else "sampled")
        samples = self.rollouts.sample(self.source, self.probe_rows(), key, sampling, Clock(), score=False)
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

    def _batches(self, samples: list[Sample], max_tokens: int | None = None) -> list[MicroBatch]:
        limit = max_tokens or self.context.recipe.train.max_tokens_per_device
        return plan_updates(samples, updates=1, units=len, max_tokens=limit, ranks=self.ranks, key=("probe",))[
            0
        ].batches

    # ---- the gates

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
            share = gaps.setdefault(self.source.rows[old.row].modality, [])
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
            noise = self._packing_noise(inputs)
            self.loop.log_ratio_tolerance = max(1e-6, 3 * noise)
        largest = max(self.ranks.gather(largest))
        tolerance = max(self.ranks.gather(self.loop.log_ratio_tolerance))
        self.loop.log_ratio_tolerance = tolerance
        if largest > tolerance:
            raise GateRefused(
                f"max |log ratio| of two passes over the same weights is {largest:.3g}, at most {tolerance:.3g} is allowed"
            )
        return f"max |log ratio| {largest:.3g}, allowed {tolerance:.3g}"

    @torch.no_grad()
    def _packing_noise(self, inputs) -> float:
        """Largest difference that another packing of the same sequences makes. The same number of forwards on every rank.

        In eval mode: with dropout it would measure, and then allow, what the gate is there to find.
        """
        noise = 0.0
        self.policy.module.eval()
        for x in inputs:
            reference = self.policy.logprobs(x, self.temperature)[0]
            turned = self.policy.logprobs(x[::-1], self.temperature)[0]
            parts = list(turned.split([len(tokens) for _, tokens in x[::-1]]))[::-1]
            noise = max(noise, (torch.cat(parts) - reference).abs().max().item())
        self.policy.module.train()
        return noise

    def g6_agreement(self) -> str:
        """Engine and trainer log-probs of the same tokens, by modality: Pearson of probabilities and mean |difference|."""
        samples = self.probe()
        trained = self.trainer_logprobs(samples)
        by_modality: dict[str, list[Sample]] = {}
        for sample in samples:
            by_modality.setdefault(self.source.rows[sample.row].modality, []).append(sample)
        found = {name: compare(share, trained) for name, share in sorted(by_modality.items())}
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
        checked: dict[str, int] = {}
        for sample in self.probe():
            prompt = self.source.encode(sample.row)
            if sample.prompt_ids != prompt.ids:
                pairs = list(zip(sample.prompt_ids, prompt.ids))
                first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                raise GateRefused(
                    f"row {prompt.row.id} ({prompt.row.modality}): the engine saw {len(sample.prompt_ids)} prompt ids, "
                    f"the processor wrote {len(prompt.ids)}; first difference at position {first}"
                )
            checked[prompt.row.modality] = checked.get(prompt.row.modality, 0) + 1
        return "equal prompt ids: " + ", ".join(f"{n} {k}" for k, n in sorted(checked.items()))

    def g9_rewards(self) -> str:
        """Every reward gives one finite number, in time, for a canary answer to each probe row.

        A reward whose failures `on_failure` tolerates must still work for one of them.
        """
        rows = [self.source.rows[i] for i in self.probe_rows()]
        sample = self.probe()[0]
        limit = max(len(sample.tokens), self.context.recipe.rollout.max_new_tokens)
        scorer = self.rollouts.scorer
        found = scorer.canary([facts(row, sample, limit) for row in rows], sample.text)
        failures = []
        for (name, report), spec in zip(found.items(), self.context.recipe.rewards, strict=True):
            if report["failures"] and (spec.on_failure == "fail" or not report["values"]):
                failures += [f"{name}: {line}" for line in report["failures"]]
        if failures:
            raise GateRefused(
                f"{len(failures)} of {len(rows) * len(found)} canary scores failed, 0 are allowed; {failures[0]}"
            )
        return "; ".join(
            f"{name}: {len(report['values'])} of {len(rows)} rows, {min(report['values']):.3g} to "
            f"{max(report['values']):.3g}, in {report['seconds']:.2g} s"
            if report["values"]
            else f"{name}: scores none of these rows"
            for name, report in found.items()
        )

    def g10_checkpoint(self) -> str:
        """The real sharded state, written and read back, is whole and bitwise the same."""
        optimizer = self.loop.state.optimizer
        fresh = not optimizer.state
        try:
            if fresh:
                self._fill_one(optimizer)
            moments = sum(isinstance(v, torch.Tensor) for state in optimizer.state.values() for v in state.values())
            found = self.context.checkpointer.round_trip(self.policy.module, optimizer)
        except OmnitrainError as error:
            raise GateRefused(str(error)) from error
        finally:
            if fresh:
                optimizer.state.clear()
        weights, trained = found.tensors - moments, len(self.policy.trainable())
        if weights < trained:
            raise GateRefused(f"a checkpoint holds {weights} weights, {trained} are trained")
        if found.unequal:
            raise GateRefused(f"{len(found.unequal)} of {found.tensors} tensors came back changed: {found.unequal[:3]}")
        return f"{found.tensors} tensors, {found.bytes / 2**20:.1f} MiB, came back bitwise equal"

    def _fill_one(self, optimizer: torch.optim.Optimizer) -> None:
        """Moments for one parameter, as AdamW will make them: before the first update there are none to write."""
        _, parameter = self.policy.trainable()[0]
        moment = parameter.detach().clone()
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment.square()}
