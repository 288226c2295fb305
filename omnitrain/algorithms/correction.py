"""Rollout correction: the engine that sampled and the trainer that learns do not agree exactly on the log-probs.

    d_it  = trainer_it - rollout_it                                  trainer: the policy the step started with
    w_it  = exp(d_it)  or  exp(sum_t d_it)                           token or sequence importance weight
    limit = min(w, cap)  (truncated importance sampling, TIS)   or   w within [floor, cap], else 0  (IcePop)

and rejection, of tokens or of whole sequences (by their mean), whose estimate of the KL from engine to trainer lies
outside [low, high]: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. A masked weight is 0 and still counts in the loss's
denominator; a rejected item does not. "Token" is any item with a log-prob: a denoising step is one too.
TIS: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al., 2025); IcePop: Ring-1T,
arXiv 2510.18855; k1 to k3: Schulman, "Approximating KL Divergence", 2020.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from omnitrain.algorithms.packed import check_lengths, per_token, sequence_means, sequence_sums

Level = Literal["none", "token", "sequence"]


def correction(
    trainer: Tensor,
    rollout: Tensor,
    lengths: Tensor | Sequence[int],
    *,
    weights: Level = "none",
    limit: Literal["truncate", "mask"] = "truncate",
    cap: float = 2.0,
    floor: float = 0.5,
    reject: Level = "none",
    reject_kl: Literal["k1", "k2", "k3"] = "k3",
    reject_low: float | None = None,
    reject_high: float | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weights and a keep mask for `gspo_loss` or `dapo_loss`, without gradient.

    trainer, rollout: (N,) log-probs of the same tokens under the trainer's old policy and the engine, nats.
    lengths:          (S,) tokens of each sequence, all >= 1.
    reject_low, reject_high: in nats, inclusive bounds of what is kept; None is no bound.

    Returns weights (N,) in the dtype of `trainer` (1 without weights), keep (N,) bool, and statistics, each a scalar
    tensor: sums to add over micro-batches and ranks, and `*_max` to take the maximum of. `correction_metrics` reads
    them. They count the items the weights (tokens or sequences) and the rejection work on; weights of rejected items
    are in none.
    Raises ValueError for shapes that do not fit, an empty sequence or a rollout log-prob that is not finite.
    """
    sizes = check_lengths(lengths, trainer=trainer, rollout=rollout)
    if not torch.isfinite(rollout).all():
        raise ValueError("a log-prob of the rollout engine is not finite")
    delta = trainer.detach() - rollout.detach().to(trainer.dtype)
    keep, stats = torch.ones_like(delta, dtype=torch.bool), {}
    if reject != "none":
        keep, stats = _kept(delta, sizes, reject, reject_kl, reject_low, reject_high)
    if weights == "none":
        return torch.ones_like(delta), keep, stats
    log_weight = delta if weights == "token" else sequence_sums(delta, sizes)
    raw = log_weight.exp()
    if limit == "truncate":
        cut, limited = raw > cap, raw.clamp(max=cap)
    else:
        cut = ~((raw >= floor) & (raw <= cap))
        limited = raw.masked_fill(cut, 0.0)
    counted = keep if weights == "token" else _any_kept(keep, sizes)
    used, name = limited[counted], "truncated" if limit == "truncate" else "masked"
    zero = delta.new_zeros(())
    stats |= {
        "correction_weight_count": zero + used.numel(),
        "correction_weight_sum": used.sum(),
        "correction_weight_square_sum": used.square().sum(),
        "correction_weight_max": used.max() if used.numel() else zero - torch.inf,
        # The smallest weight, negated: statistics over micro-batches and ranks are sums or maxima.
        "correction_negative_weight_max": (-used).max() if used.numel() else zero - torch.inf,
        f"correction_{name}_count": cut[counted].sum().to(delta.dtype),
    }
    return limited if weights == "token" else per_token(limited, sizes), keep, stats


def _kept(
    delta: Tensor, sizes: list[int], level: Level, kind: str, low: float | None, high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which tokens (N,) the bounds keep, and how many items were rejected of how many."""
    estimate = {"k1": lambda d: -d, "k2": lambda d: d.square() / 2, "k3": lambda d: torch.expm1(d) - d}[kind](delta)
    if level == "sequence":
        estimate = sequence_means(estimate, sizes)
    keep = torch.ones_like(estimate, dtype=torch.bool)
    # Compared so that NaN is rejected.
    if low is not None:
        keep &= estimate >= low
    if high is not None:
        keep &= estimate <= high
    stats = {
        "correction_rejected_count": (~keep).sum().to(delta.dtype),
        "correction_rejectable_count": delta.new_zeros(()) + keep.numel(),
    }
    return per_token(keep, sizes) if level == "sequence" else keep, stats


def _any_kept(keep: Tensor, sizes: list[int]) -> Tensor:
    """(N,) -> (S,): whether a sequence has a kept token."""
    return sequence_sums(keep.long(), sizes) > 0


def correction_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """What to log of an update or a step, from the statistics added (or their maxima taken) over its micro-batches.

    weight_mean, weight_min, weight_max; truncated, masked and rejected as shares of the items they work on; and
    effective_samples, (sum w)^2 / (n sum w^2): the share of the items that weights so uneven are worth, 1 if equal.
    """
    values: dict[str, float] = {}
    if count := sums.get("correction_weight_count", 0):
        total, squares = sums["correction_weight_sum"], sums["correction_weight_square_sum"]
        values = {
            "correction/weight_mean": total / count,
            "correction/weight_min": -maxima["correction_negative_weight_max"],
            "correction/weight_max": maxima["correction_weight_max"],
            "correction/effective_samples": total**2 / (count * squares) if squares else 0.0,
        }
        for name in ("truncated", "masked"):
            if f"correction_{name}_count" in sums:
                values[f"correction/{name}"] = sums[f"correction_{name}_count"] / count
    if count := sums.get("correction_rejectable_count", 0):
        values["correction/rejected"] = sums["correction_rejected_count"] / count
    return values
