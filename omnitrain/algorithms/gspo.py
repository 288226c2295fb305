"""GSPO, Group Sequence Policy Optimization (arXiv 2507.18071, equations 5, 7 and 13).

    m_i     = mean_t (logp_it - old_it)                              the sequence's log ratio
    s_it    = exp(min(logp_it - sg(logp_it) + sg(m_i), 10))          its value is exp(m_i) at every token
    L_it    = max(-A_i s_it, -A_i clip(s_it, 1 - clip_low, 1 + clip_high))
    loss    = sum_i mean_t w_it L_it

This is the token form: with one advantage per sequence its value and gradient equal the sequence
form's. Sequence-mean of token-mean is the only aggregation. The clip range 3e-4 / 4e-4 is the paper's.
w is 1, or a rollout correction's weight (`algorithms/correction.py`): a token's weight scales that token's gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from omnitrain.algorithms.packed import check_lengths, kept_tokens, per_token, sequence_means

MAX_LOG_RATIO = 10.0


def units(lengths: Tensor | Sequence[int]) -> int:
    """What the loss is summed over, so what to divide by: sequences."""
    return len(lengths)


def gspo_loss(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Tensor | Sequence[int],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over sequences; divide by the sequences of the whole update, over all ranks.

    logp:       (N,) log-probs of the response tokens under the policy, nats, with gradient.
    old:        (N,) the same under the policy the step started with, without gradient.
    advantages: (S,) one per sequence.
    lengths:    (S,) response tokens of each sequence, all >= 1; S = 0 gives a loss of 0.
    weights:    (N,) importance weights of the tokens, without gradient; None is 1.
    keep:       (N,) bool, False for a rejected token: it is in neither the ratio nor the mean, as if it had not been
                sampled. A sequence counts as a unit while it has a kept token.

    Returns the scalar sum and statistics without gradient, each a scalar tensor: `ratio_sum` and `ratio_count` (over
    sequences), `clip_low_count`, `clip_high_count`, `units` (add them over micro-batches and ranks) and `ratio_max`,
    `abs_log_ratio_max` (take the maximum). `clip_low_count` counts the sequences that lost their gradient below
    1 - clip_low (A < 0), `clip_high_count` those above 1 + clip_high (A > 0); `abs_log_ratio_max` is over tokens.
    Raises ValueError for an empty sequence or shapes that do not fit.
    """
    sizes = check_lengths(lengths, logp=logp, old=old, weights=weights, keep=keep)
    if advantages.shape != (len(sizes),):
        raise ValueError(f"advantages is {tuple(advantages.shape)}, but there are {len(sizes)} sequences")
    sizes, left, (logp, old, weights) = kept_tokens(keep, sizes, logp, old, weights)
    advantages = advantages.detach().to(logp.dtype)[left.to(advantages.device)]
    log_ratio = logp.detach() - old.detach()
    sequence = sequence_means(log_ratio, sizes)
    ratio_tokens = (logp - logp.detach() + per_token(sequence, sizes)).clamp(max=MAX_LOG_RATIO).exp()
    advantage_tokens = per_token(advantages, sizes)
    clipped = ratio_tokens.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-advantage_tokens * ratio_tokens, -advantage_tokens * clipped)
    if weights is not None:
        losses = losses * weights.detach()
    loss = sequence_means(losses, sizes).sum()

    ratio = sequence.clamp(max=MAX_LOG_RATIO).exp()
    zero = logp.new_zeros(())
    stats = {
        "ratio_sum": ratio.sum(),
        "ratio_count": zero + len(sizes),
        "ratio_max": ratio.max() if sizes else zero,
        "clip_low_count": ((ratio < 1 - clip_low) & (advantages < 0)).sum().to(logp.dtype),
        "clip_high_count": ((ratio > 1 + clip_high) & (advantages > 0)).sum().to(logp.dtype),
        "abs_log_ratio_max": log_ratio.abs().max() if sizes else zero,
        "units": zero + len(sizes),
    }
    return loss, stats
