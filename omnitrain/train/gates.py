"""The gates: before the first step, does this run train what it seems to?

Every gate compares two numbers that must agree and names both when they do not. They run on a few real rows of the run,
of every kind that its data hold, under a forked random state, and leave the weights bit for bit as they were: skipping a
gate changes no metric. What the online and the offline runs check is in online_gates.py and offline_gates.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from omnitrain import device as devices
from omnitrain.data.sample import Sample
from omnitrain.errors import GateRefused, OmnitrainError
from omnitrain.recipe.gates import Gate
from omnitrain.train.context import Context
from omnitrain.train.loop import Loop
from omnitrain.train.probe import Probe, choose
from omnitrain.train.updates import MicroBatch, plan_updates

LOG_RATIO = 1e-6
"""Largest difference of log-probs that rounding makes in float32 between two passes over one packing."""


@dataclass
class Verdict:
    """What one gate found."""

    gate: str
    ok: bool
    detail: str
    seconds: float = 0.0
    skipped: bool = False


class Skipped(Exception):
    """There is nothing for this gate to compare; its text says why. Raised on all ranks alike."""


class Gates:
    """Runs a run's gates in order; the first that fails stops it. A subclass says which gates there are."""

    words: dict[str, Gate]
    """What each of them is in words, for refusals."""
    together = False
    """Whether the responses to a row stay in one micro-batch."""

    def __init__(self, context: Context, loop: Loop) -> None:
        self.context, self.loop = context, loop
        self.policy, self.ranks, self.source = context.policy, context.ranks, loop.source

    def run(self) -> list[Verdict]:
        """All gates. Writes gates.json. Raises GateRefused with the gate, both numbers and the likely causes."""
        verdicts: list[Verdict] = []
        with devices.forked_rng(self.ranks.device):
            self._begin()
            for gate, check in self._checks():
                verdict = self._one(gate, check)
                verdicts.append(verdict)
                self._report(verdicts)
                if not verdict.ok:
                    words = self.words[gate]
                    causes = "".join(f"\n  - {cause}" for cause in words.causes)
                    raise GateRefused(f"{gate} ({words.title}): {verdict.detail}\nlikely causes:{causes}")
        return verdicts

    def _begin(self) -> None:
        """What the gates rely on."""

    def _checks(self) -> list[tuple[str, Callable[[], str]]]:
        raise AssertionError("a subclass's")

    def _one(self, gate: str, check: Callable[[], str]) -> Verdict:
        if gate in self.context.recipe.gates.skip:
            return Verdict(gate, True, "skipped by gates.skip", skipped=True)
        started = time.perf_counter()
        try:
            detail, ok = check(), True
        except GateRefused as refused:
            detail, ok = str(refused).removeprefix(f"{gate}: "), False
        except Skipped as why:
            return Verdict(gate, True, str(why), time.perf_counter() - started, skipped=True)
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

    @cached_property
    def probed(self) -> Probe:
        """The rows that the gates look at."""
        found = choose(self.source, tracks=bool(self.context.recipe.data.use_audio_in_video))
        for text in found.missing:
            self.context.console.say(f"warning: the gates look at {text}")
        return found

    def _batches(self, samples: list[Sample], max_tokens: int | None = None) -> list[MicroBatch]:
        return plan_updates(
            samples,
            updates=1,
            units=len,
            max_tokens=max_tokens or self.context.recipe.train.max_tokens_per_device,
            ranks=self.ranks,
            key=("probe",),
            together=self.together,
        )[0].batches

    @torch.no_grad()
    def _packing_noise(self, inputs, temperature: float) -> float:
        """Largest difference that another packing of the same sequences makes. The same number of forwards on every rank.

        In eval mode: with dropout it would measure, and then allow, what the gate is there to find.
        """
        noise = 0.0
        self.policy.module.eval()
        for x in inputs:
            reference = self.policy.logprobs(x, temperature)[0]
            turned = self.policy.logprobs(x[::-1], temperature)[0]
            parts = list(turned.split([len(tokens) for _, tokens in x[::-1]]))[::-1]
            noise = max(noise, (torch.cat(parts) - reference).abs().max().item())
        self.policy.module.train()
        return noise

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
