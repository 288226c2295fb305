"""From a recipe's algorithm to what the loops need: units, advantages and a loss on packed log-probs.

A loss is a sum; the loop divides it by the units of the whole update, so that neither ranks nor
micro-batches change a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omnitrain.algorithms.advantages import group_advantages
from omnitrain.algorithms.gspo import gspo_loss
from omnitrain.algorithms.kl import kl_loss
from omnitrain.algorithms.sft import sft_loss
from omnitrain.data.sample import Sample
from omnitrain.recipe.schema import Gspo


@dataclass
class Batch:
    """One packed micro-batch, its response tokens concatenated."""

    lengths: Tensor
    """(S,) response lengths."""
    advantages: Tensor
    """(S,)"""
    old: Tensor | None = None
    """(N,) log-probs the ratio is taken against; None is the current ones, detached."""
    reference: Tensor | None = None
    """(N,) log-probs with the adapter off, where a KL is asked for."""


class GspoObjective:
    """GSPO over groups of sampled responses. Units are sequences."""

    def __init__(self, spec: Gspo) -> None:
        self.spec = spec

    @property
    def needs_reference(self) -> bool:
        return self.spec.kl > 0

    def assign_advantages(self, samples: list[Sample]) -> dict[str, float]:
        """Write `advantage` into every sample; returns what to log of it."""
        rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
        groups = torch.tensor([s.group for s in samples])
        kept = torch.tensor([not s.failed for s in samples])
        advantages, zero_std = group_advantages(rewards, groups, kept)
        for sample, advantage in zip(samples, advantages.tolist()):
            sample.advantage = advantage
        good = rewards[kept]
        return {
            "train/reward_mean": good.mean().item(),
            "train/reward_std": good.std(correction=0).item(),
            "train/zero_std_ratio": float(zero_std),
        }

    def units(self, samples: list[Sample]) -> int:
        """How many samples an update over these counts."""
        return sum(not s.failed for s in samples)

    def loss(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over the batch's sequences, and sums to log. logp is (N,)."""
        old = logp.detach() if batch.old is None else batch.old
        loss, stats = gspo_loss(
            logp,
            old,
            batch.advantages,
            batch.lengths,
            clip_low=self.spec.clip_low,
            clip_high=self.spec.clip_high,
        )
        if batch.reference is not None:
            kl, kl_stats = kl_loss(logp, batch.reference, batch.lengths)
            loss, stats["kl_sum"] = loss + self.spec.kl * kl, kl_stats["kl_sum"]
        return loss, stats


class SftObjective:
    """Cross-entropy on given responses. Units are target tokens."""

    needs_reference = False

    def units(self, samples: list[Sample]) -> int:
        """Target tokens of an update over these."""
        return sum(len(s.tokens) for s in samples)

    def loss(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over target tokens of the cross-entropy. logp is (N,)."""
        return sft_loss(logp, batch.lengths)
