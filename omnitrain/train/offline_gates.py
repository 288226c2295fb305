"""The gates of an offline run: the adapters are trained, and DPO's reference is the policy that training starts from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch

from omnitrain.data.sample import Sample
from omnitrain.errors import GateRefused
from omnitrain.recipe.gates import OFFLINE
from omnitrain.train.context import Context
from omnitrain.train.distributed import Ranks
from omnitrain.train.gates import LOG_RATIO, Gates, Skipped
from omnitrain.train.objectives import Batch
from omnitrain.train.offline import TEMPERATURE, OfflineLoop
from omnitrain.train.updates import MicroBatch, largest

# Reference log-probs that were computed beforehand come from another packing: rounding per token, in float32.
_STORED = 1e-5


class OfflineGates(Gates):
    """The probe is a few training rows of every kind with their own responses."""

    words = OFFLINE

    def __init__(self, context: Context, loop: OfflineLoop) -> None:
        super().__init__(context, loop)
        self.together = loop.together
        self._samples: list[Sample] = []

    def _checks(self) -> list[tuple[str, Callable[[], str]]]:
        checks = [("g3", self.g3_adapters_bound)]
        if self.context.recipe.algorithm.kind == "dpo":
            checks.append(("g5", self.g5_reference))
        return [*checks, ("g10", self.g10_checkpoint)]

    def samples(self) -> list[Sample]:
        """The probe rows' responses."""
        self._samples = self._samples or self.loop.samples(self.source, self.probed.rows)
        return self._samples

    def g3_adapters_bound(self) -> str:
        """Every target of the adapter is bound and trained: a backward pass reaches each of them.

        Without an adapter: a backward pass reaches each trained tensor.
        """
        lora = self.context.recipe.model.lora
        trained = [name for name, _ in self.policy.trainable()]
        if lora is None:
            self._refuse_without_gradient({name: [name] for name in trained}, "trained tensors")
            return f"{len(trained)} tensors trained, each has a gradient"
        factors: dict[str, list[str]] = {}
        for name in trained:
            factors.setdefault(name.partition(".lora_")[0], []).append(name)
        bound = Counter(name.rsplit(".", 1)[-1] for name in factors)
        if missing := [target for target in lora.module_names() if not bound[target]]:
            raise GateRefused(f"{', '.join(missing)}: 0 adapters are trained; at least 1 of each target is needed")
        if len(factors) != self.policy.lora_count or len(trained) != 2 * len(factors):
            raise GateRefused(
                f"{self.policy.lora_count} adapters are bound, and {len(trained)} of their {2 * self.policy.lora_count} "
                "factors are trained"
            )
        self._refuse_without_gradient(factors, "adapters")
        counted = ", ".join(f"{bound[target]} {target}" for target in sorted(bound))
        return f"{len(factors)} adapters trained ({counted}), each has a gradient"

    def _refuse_without_gradient(self, parts: dict[str, list[str]], what: str) -> None:
        """parts: parameters by what they belong to; one of them is enough, as half of a fresh adapter has none."""
        norms = self._gradients()
        found = {part: largest([norms[name] for name in names]) for part, names in parts.items()}
        if bad := [part for part, norm in found.items() if not 0 < norm < math.inf]:
            raise GateRefused(
                f"{len(bad)} of {len(parts)} {what} have no gradient that is finite and above 0: largest entry "
                + ", ".join(f"{found[part]:.3g} of {part}" for part in bad[:3])
            )

    def _gradients(self) -> dict[str, float]:
        """Largest |gradient| of each trained tensor, over all ranks, of the log-probs of the probe's responses."""
        self.policy.module.train()
        for batch in self._batches(self.samples()):
            logp, _ = self.policy.logprobs(batch.inputs(self.source.encode), TEMPERATURE)
            logp.mean().backward()
        norms = {name: _largest_entry(parameter.grad) for name, parameter in self.policy.trainable()}
        self.loop.state.optimizer.zero_grad(set_to_none=True)
        shares = self.ranks.gather(norms)
        return {name: largest([share[name] for share in shares]) for name in norms}

    def g5_reference(self) -> str:
        """Policy against reference before step 1: max |log ratio| of a token, and each pair's D, within rounding."""
        model = self.context.recipe.model
        if self.loop.state.step:
            raise Skipped(f"step {self.loop.state.step} has moved the policy from its reference")
        if model.init_from and model.lora:
            raise Skipped("model.init_from starts the policy elsewhere than the reference, the model without adapter")
        self.policy.module.train()
        tokens = pairs = noise = 0.0
        for batch in self._batches(self.samples()):
            ratio, difference = self._against_reference(batch)
            tokens, pairs = largest([tokens, ratio]), largest([pairs, difference])
            if model.dtype != "float32":
                noise = max(noise, self._packing_noise([batch.inputs(self.source.encode)], TEMPERATURE))
        self.loop.state.optimizer.zero_grad(set_to_none=True)
        live = self.loop.objective.needs_reference
        allowed = _agreed(self.ranks, max(LOG_RATIO if live else _STORED, 3 * noise))
        tokens, pairs = _agreed(self.ranks, tokens), _agreed(self.ranks, pairs)
        text = f"max |log ratio| {tokens:.3g}, largest |D| of a pair {pairs:.3g}"
        if not max(tokens, pairs) <= allowed:
            raise GateRefused(f"{text} before step 1 (D per token); at most {allowed:.3g} is allowed")
        return f"{text}, allowed {allowed:.3g}"

    def _against_reference(self, batch: MicroBatch) -> tuple[float, float]:
        """Largest |log ratio| of a token, or where the reference is stored the mean of a response's; and the largest
        |D| of a pair, as the loss sees it, per token of the pair."""
        inputs, objective = batch.inputs(self.source.encode), self.loop.objective
        reference = None
        if objective.needs_reference:
            with torch.no_grad(), self.policy.reference():
                reference = self.policy.logprobs(inputs, TEMPERATURE)[0]
        logp, _ = self.policy.logprobs(inputs, TEMPERATURE, entropy=True)
        # As in gate g5 of the online runs: under FSDP a forward with gradients wants its backward.
        (logp.sum() * 0.0).backward()
        logp = logp.detach()
        lengths = torch.tensor([len(sample.tokens) for sample in batch.samples], device=logp.device)
        sums = batch.reference_sums(logp.device)
        if reference is not None:
            ratio = (logp - reference).abs().max().item()
        else:
            whole = torch.stack([part.double().sum() for part in logp.split(lengths.tolist())])
            ratio = ((whole - sums) / lengths).abs().max().item()
        given = Batch(lengths, logp.new_zeros(len(lengths)), reference=reference, reference_sums=sums)
        margin = objective.pairs(logp, given)[1]["margin"] / objective.spec.beta
        size = 2 if objective.spec.average_logprobs else lengths.view(-1, 2).sum(1)
        return ratio, (margin / size).abs().max().item()


def _largest_entry(gradient: torch.Tensor | None) -> float:
    """0 without a gradient, and where this rank holds no part of it; NaN if one is in it."""
    if gradient is None:
        return 0.0
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.abs().max().item() if local.numel() else 0.0


def _agreed(ranks: Ranks, value: float) -> float:
    return largest(ranks.gather(value))
