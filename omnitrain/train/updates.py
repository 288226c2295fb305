"""How the samples of a step become optimizer updates, and one update.

Groups are shuffled whole by (seed, step) and cut into updates; each update is packed into
micro-batches of equal tokens, the same number on every rank. The units an update is divided by
are counted over all ranks before its first backward.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from omnitrain.data.batching import balanced
from omnitrain.data.sample import Prompt, Sample
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.train.distributed import Ranks
from omnitrain.train.objectives import Batch
from omnitrain.train.seeds import derive

Encode = Callable[[int], Prompt]


@dataclass
class MicroBatch:
    """What one rank packs into one forward."""

    samples: list[Sample]
    filler: bool = False
    """Without samples of its own this rank repeats one, at weight 0, so that collectives match."""
    old: Tensor | None = None

    def inputs(self, encode: Encode) -> list[tuple[Prompt, list[int]]]:
        """The sequences as the policy takes them; prompts are encoded again from their rows."""
        return [(encode(s.row), s.tokens) for s in self.samples]

    def rollout(self, device: torch.device) -> Tensor:
        """(N,) the engine's log-probs of the response tokens."""
        return torch.tensor([x for sample in self.samples for x in sample.logprobs], device=device)

    def reference_sums(self, device: torch.device) -> Tensor | None:
        """(S,) the reference's summed log-probs of the responses, where they were computed before the run."""
        sums = [sample.reference_sum for sample in self.samples]
        return None if None in sums else torch.tensor(sums, device=device)


@dataclass
class Update:
    """One optimizer update, as this rank sees it."""

    samples: list[Sample]
    """All ranks' samples."""
    units: int
    """What the summed loss is divided by."""
    batches: list[MicroBatch]
    """This rank's."""


def plan_updates(
    samples: list[Sample],
    *,
    updates: int,
    units: Callable[[list[Sample]], int],
    max_tokens: int,
    ranks: Ranks,
    key: tuple,
    together: bool = False,
) -> list[Update]:
    """Cut a step's samples into updates and this rank's micro-batches. The same call on every rank.

    key: the (seed, step) that shuffles the groups.
    together: keep each group's samples in one micro-batch, in their order: a preference pair is one item of the loss.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if not sample.failed:
            groups.setdefault(sample.group, []).append(sample)
    order = sorted(groups)
    random.Random(derive("updates", *key)).shuffle(order)
    planned = []
    for index in range(updates):
        share = order[index * len(order) // updates : (index + 1) * len(order) // updates]
        chosen = [sample for group in share for sample in groups[group]]
        if chosen:
            items = [groups[group] for group in share] if together else [[sample] for sample in chosen]
            planned.append(Update(chosen, units(chosen), _pack(items, max_tokens, ranks)))
    return planned


def _pack(items: list[list[Sample]], max_tokens: int, ranks: Ranks) -> list[MicroBatch]:
    lengths = [sum(len(s.prompt_ids) + len(s.tokens) for s in item) for item in items]
    what = "a response" if all(len(item) == 1 for item in items) else "the pair of responses"
    name = lambda index: f"{what} to row {items[index][0].row} of the data"  # noqa: E731
    mine = balanced(lengths, max_tokens, ranks.world, name)[ranks.rank]
    shortest = items[lengths.index(min(lengths))]
    batches = [[sample for index in bin for sample in items[index]] for bin in mine]
    return [MicroBatch(batch) if batch else MicroBatch(shortest, filler=True) for batch in batches]


@dataclass
class UpdateStats:
    """Sums over this rank's share of an update."""

    sums: Counter = field(default_factory=Counter)
    maxima: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """The trainer's log-probs by (group, child), of the first forward of the update."""

    def add(self, stats: dict[str, Tensor]) -> None:
        for name, value in stats.items():
            value = float(value)
            if name.endswith("_max"):
                self.maxima[name] = largest([self.maxima.get(name, -math.inf), value])
            else:
                self.sums[name] += value


def largest(values: list[float]) -> float:
    """The largest of `values`, NaN if one of them is: the built-in max() keeps or drops NaN by its place."""
    return math.nan if any(map(math.isnan, values)) else max(values)


@torch.no_grad()
def score_batches(policy: ThinkerPolicy, updates: list[Update], encode: Encode, temperature: float) -> None:
    """Write the current policy's log-probs into every micro-batch as `old`, in the update's own packing."""
    for update in updates:
        for batch in update.batches:
            batch.old = policy.logprobs(batch.inputs(encode), temperature)[0]


def run_update(
    policy: ThinkerPolicy,
    objective,
    update: Update,
    encode: Encode,
    temperature: float,
    world: int,
    entropy: bool = True,
) -> UpdateStats:
    """Forward and backward over this rank's micro-batches; gradients are left in the parameters, unclipped."""
    collected = UpdateStats()
    for batch in update.batches:
        inputs = batch.inputs(encode)
        reference = None
        if objective.needs_reference:
            with torch.no_grad(), policy.reference():
                reference = policy.logprobs(inputs, temperature)[0]
        logp, entropies = policy.logprobs(inputs, temperature, entropy=entropy)
        lengths = torch.tensor([len(s.tokens) for s in batch.samples], device=logp.device)
        advantages = torch.tensor([s.advantage for s in batch.samples], device=logp.device, dtype=logp.dtype)
        rollout = batch.rollout(logp.device) if objective.needs_rollout else None
        sums = batch.reference_sums(logp.device)
        loss, stats = objective.loss(logp, Batch(lengths, advantages, batch.old, reference, rollout, sums))
        # FSDP averages gradients over ranks; times the world size this is the sum over all of them.
        weight = 0.0 if batch.filler else world / update.units
        (loss * weight).backward()
        if batch.filler:
            continue
        collected.add(stats)
        collected.sums["loss_sum"] += float(loss.detach())
        if entropies is not None:
            collected.sums["entropy_sum"] += float(entropies.sum())
        collected.tokens += logp.numel()
        for sample, part in zip(batch.samples, logp.detach().float().cpu().split(lengths.tolist())):
            collected.logprobs[sample.group, sample.child] = part.tolist()
    return collected
