"""From a recipe's algorithm to what the loops need: units, advantages and a loss on packed log-probs.

A loss is a sum; the loop divides it by the units of the whole update, so that neither ranks nor micro-batches change
a gradient. `units(samples)` is what an update plans to count; `stats["units"]` of a loss is what it really counted,
which is less where the rollout correction rejected something.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omnitrain.algorithms.advantages import combined_advantages, group_advantages, varied_groups
from omnitrain.algorithms.correction import correction
from omnitrain.algorithms.dapo import dapo_loss, overlong_penalty
from omnitrain.algorithms.dpo import dpo_loss, dpo_pairs, response_logprobs
from omnitrain.algorithms.gspo import gspo_loss
from omnitrain.algorithms.kl import kl_loss
from omnitrain.algorithms.packed import count_units
from omnitrain.algorithms.sft import sft_loss
from omnitrain.data.sample import Sample
from omnitrain.recipe.algorithms import Dapo, Dpo, Gspo
from omnitrain.rewards import reward_names

if TYPE_CHECKING:
    from omnitrain.recipe.schema import Recipe

PENALTY = "overlong_penalty"
"""Name of the overlong penalty among a sample's rewards."""


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
    """(N,) log-probs under the reference, where a KL or DPO asks for them."""
    rollout: Tensor | None = None
    """(N,) the engine's own log-probs, where a correction asks for them."""
    reference_sums: Tensor | None = None
    """(S,) the reference's log-probs summed over each response, where they were computed before the run."""


def build_objective(recipe: Recipe) -> GspoObjective | DapoObjective | DpoObjective | SftObjective:
    """The recipe's objective, with what it needs from other tables."""
    algorithm = recipe.algorithm
    if algorithm.kind == "sft":
        return SftObjective()
    if algorithm.kind == "dpo":
        return DpoObjective(algorithm)
    weights = dict(zip(reward_names(recipe.rewards), (spec.weight for spec in recipe.rewards), strict=True))
    if algorithm.kind == "gspo":
        return GspoObjective(algorithm, weights)
    return DapoObjective(algorithm, weights, max_new_tokens=recipe.rollout.max_new_tokens)


class _GroupObjective(ABC):
    """What GSPO and DAPO share: groups of sampled responses, their advantages, the KL and the rollout correction.

    reward_weights: by reward name, as in `Sample.rewards`; only `combine = "advantage"` reads them.
    """

    def __init__(self, spec: Gspo | Dapo, reward_weights: dict[str, float] | None = None) -> None:
        self.spec = spec
        self.reward_weights = reward_weights or {}

    @property
    def needs_reference(self) -> bool:
        return self.spec.kl > 0

    @property
    def needs_rollout(self) -> bool:
        """Whether `loss` reads `Batch.rollout`."""
        return self.spec.correction is not None

    @property
    def rejects(self) -> bool:
        """Whether a loss may count fewer units than planned."""
        return self.spec.correction is not None and self.spec.correction.reject != "none"

    @property
    def most_draws(self) -> int:
        """How often a step may draw prompts; more than once with dynamic sampling."""
        return 1

    def keep_groups(self, samples: list[Sample]) -> set[int]:
        """Groups to train on; all of them without dynamic sampling."""
        return {s.group for s in samples}

    def assign_advantages(self, samples: list[Sample]) -> dict[str, float]:
        """Write `advantage` into every sample; returns what to log of it."""
        advantages = self._advantages(samples)
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample.advantage = advantage
        return {}

    @abstractmethod
    def units(self, samples: list[Sample]) -> int:
        """What an update over these counts."""

    def loss(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over the batch, and sums and maxima to log. logp is (N,)."""
        old = logp.detach() if batch.old is None else batch.old
        weights = keep = None
        stats: dict[str, Tensor] = {}
        if self.spec.correction is not None:
            # With the bypass `old` is the engine's: only the current policy tells how far the two are apart.
            trainer = logp if self.spec.old_logprobs == "rollout" else old
            weights, keep, stats = correction(
                trainer, batch.rollout, batch.lengths, **self.spec.correction.model_dump()
            )
        loss, found = self._policy_loss(logp, old, batch, weights, keep)
        stats |= found
        if batch.reference is not None:
            kl, kl_stats = self._kl_loss(logp, batch, keep)
            loss, stats["kl_sum"] = loss + self.spec.kl * kl, kl_stats["kl_sum"]
        return loss, stats

    @abstractmethod
    def _policy_loss(self, logp: Tensor, old: Tensor, batch: Batch, weights: Tensor | None, keep: Tensor | None):
        """The algorithm's own sum over the batch, and its statistics."""

    def _kl_loss(self, logp: Tensor, batch: Batch, keep: Tensor | None):
        return kl_loss(logp, batch.reference, batch.lengths, keep=keep)

    def _advantages(self, samples: list[Sample], penalties: Tensor | None = None) -> Tensor:
        """Advantages (N,); penalties (N,) are added to the reward.

        With advantages combined, penalties have one of their own, which is not divided by their std: that would make
        a single token into the buffer as bad as a whole response too long.
        """
        rewards, groups, kept = _columns(samples)
        options = {"std": self.spec.advantage_std, "leave_one_out": self.spec.leave_one_out}
        if self.spec.combine == "reward":
            return group_advantages(rewards if penalties is None else rewards + penalties, groups, kept, **options)[0]
        table, weights, present = self._by_reward(samples)
        advantages = combined_advantages(table, weights, groups, kept, present, **options)[0]
        if penalties is not None:
            advantages = advantages + group_advantages(penalties, groups, kept, **options | {"std": False})[0]
        return advantages

    def _by_reward(self, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards (K, N), their weights (K,), and where one is present (K, N): it may not score every row."""
        names = list(self.reward_weights)
        table = torch.tensor([[s.rewards.get(name, float("nan")) for s in samples] for name in names]).double()
        present = torch.tensor([[name in s.rewards for s in samples] for name in names], dtype=torch.bool)
        return table, torch.tensor([self.reward_weights[name] for name in names]).double(), present


class GspoObjective(_GroupObjective):
    """GSPO over groups of sampled responses. Units are sequences."""

    def units(self, samples: list[Sample]) -> int:
        """How many samples an update over these counts."""
        return sum(not s.failed for s in samples)

    def _policy_loss(self, logp: Tensor, old: Tensor, batch: Batch, weights: Tensor | None, keep: Tensor | None):
        clip = {"clip_low": self.spec.clip_low, "clip_high": self.spec.clip_high}
        return gspo_loss(logp, old, batch.advantages, batch.lengths, **clip, weights=weights, keep=keep)


class DapoObjective(_GroupObjective):
    """DAPO over groups of sampled responses. Units are tokens, sequences or sequences * max_new_tokens.

    max_new_tokens: the rollout's limit, for the overlong penalty and for `aggregation = "fixed_length"`.
    """

    def __init__(
        self, spec: Dapo, reward_weights: dict[str, float] | None = None, *, max_new_tokens: int | None = None
    ) -> None:
        super().__init__(spec, reward_weights)
        self.max_new_tokens = max_new_tokens
        if max_new_tokens is None and (spec.overlong_buffer or spec.aggregation == "fixed_length"):
            raise ValueError('overlong_buffer and aggregation = "fixed_length" need max_new_tokens')
        fixed = spec.aggregation == "fixed_length"
        self._sum = {"aggregation": spec.aggregation, "max_tokens": max_new_tokens if fixed else None}

    @property
    def most_draws(self) -> int:
        """How often a step may draw prompts; more than once with dynamic sampling."""
        return self.spec.max_generation_batches if self.spec.dynamic_sampling else 1

    def keep_groups(self, samples: list[Sample]) -> set[int]:
        """Groups whose rewards, before the overlong penalty, are not all equal; failed samples are left out. With
        `combine = "advantage"` one reward that differs is enough."""
        if not self.spec.dynamic_sampling:
            return super().keep_groups(samples)
        rewards, groups, kept = _columns(samples)
        if self.spec.combine == "reward":
            return set(varied_groups(rewards, groups, kept))
        table, weights, present = self._by_reward(samples)
        return {
            group
            for reward, weight, scored in zip(table, weights, present, strict=True)
            if weight
            for group in varied_groups(reward, groups, kept & scored)
        }

    def assign_advantages(self, samples: list[Sample]) -> dict[str, float]:
        """Write `advantage` into every sample; returns what to log of it.

        `reward` stays the task's: the overlong penalty is in the advantage, and in `rewards` under its name.
        """
        if not self.spec.overlong_buffer:
            return super().assign_advantages(samples)
        shape = (self.max_new_tokens, self.spec.overlong_buffer, self.spec.overlong_penalty)
        for sample in samples:
            sample.rewards[PENALTY] = overlong_penalty(len(sample.tokens), *shape)
        values = super().assign_advantages(samples)
        kept = [s.rewards[PENALTY] for s in samples if not s.failed]
        return values | ({"train/overlong_penalty": sum(kept) / len(kept)} if kept else {})

    def _advantages(self, samples: list[Sample], penalties: Tensor | None = None) -> Tensor:
        if self.spec.overlong_buffer:
            penalties = torch.tensor([s.rewards[PENALTY] for s in samples], dtype=torch.float64)
        return super()._advantages(samples, penalties)

    def units(self, samples: list[Sample]) -> int:
        """Tokens, samples, or samples * max_new_tokens of an update over these."""
        return count_units([len(s.tokens) for s in samples if not s.failed], **self._sum)

    def _policy_loss(self, logp: Tensor, old: Tensor, batch: Batch, weights: Tensor | None, keep: Tensor | None):
        clip = {name: getattr(self.spec, name) for name in ("clip_low", "clip_high", "dual_clip")}
        return dapo_loss(logp, old, batch.advantages, batch.lengths, **clip, **self._sum, weights=weights, keep=keep)

    def _kl_loss(self, logp: Tensor, batch: Batch, keep: Tensor | None):
        return kl_loss(logp, batch.reference, batch.lengths, **self._sum, keep=keep)


class DpoObjective:
    """DPO over pairs of given responses, chosen and rejected in turn. Units are pairs."""

    needs_rollout = rejects = False

    def __init__(self, spec: Dpo) -> None:
        self.spec = spec

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is a forward of its own; precomputed log-probs are in `Batch.reference_sums`."""
        return self.spec.reference == "adapter"

    def units(self, samples: list[Sample]) -> int:
        """Pairs of an update over these."""
        return len(samples) // 2

    def pairs(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every pair, and its accuracy, margin, chosen_reward and rejected_reward, (P,) each."""
        return dpo_pairs(*self._responses(logp, batch), **self._settings)

    def loss(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over the batch's pairs, and sums to log. logp is (N,)."""
        return dpo_loss(*self._responses(logp, batch), **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {"beta": self.spec.beta, "label_smoothing": self.spec.label_smoothing, "kind": self.spec.loss}

    def _responses(self, logp: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs of the chosen and the rejected responses under the policy and under the reference, (P,) each."""
        average = self.spec.average_logprobs
        policy = response_logprobs(logp, batch.lengths, average=average)
        if batch.reference_sums is None:
            return *policy, *response_logprobs(batch.reference, batch.lengths, average=average)
        reference = batch.reference_sums / batch.lengths if average else batch.reference_sums
        return *policy, reference[0::2], reference[1::2]


class SftObjective:
    """Cross-entropy on given responses. Units are target tokens."""

    needs_reference = needs_rollout = rejects = False

    def units(self, samples: list[Sample]) -> int:
        """Target tokens of an update over these."""
        return sum(len(s.tokens) for s in samples)

    def loss(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over target tokens of the cross-entropy. logp is (N,)."""
        return sft_loss(logp, batch.lengths)


def _columns(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Task rewards (N,) in float64, groups (N,), and which samples did not fail (N,)."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    groups = torch.tensor([s.group for s in samples], dtype=torch.long)
    return rewards, groups, torch.tensor([not s.failed for s in samples], dtype=torch.bool)
