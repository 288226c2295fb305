"""DAPO, Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476, equations 8, 11 and 13).

    r_it    = exp(min(logp_it - old_it, 10))                         a ratio per token
    L_it    = max(-A_i r_it, -A_i clip(r_it, 1 - clip_low, 1 + clip_high))
    L_it    = min(L_it, -A_i c)  where A_i < 0                       dual clip, optional
    loss    = sum_i sum_t w_it L_it                                  over the tokens of the whole update

Clip-higher is 0.2 / 0.28. The other aggregations are GRPO's (arXiv 2402.03300) and Dr. GRPO's (arXiv 2503.20783),
see `packed.py`. Dual clip is arXiv 1912.09729, where c = 3. w is 1, or a rollout correction's weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from omnitrain.algorithms.gspo import MAX_LOG_RATIO
from omnitrain.algorithms.packed import Aggregation, aggregate, check_lengths, count_units, kept_tokens, per_token


def dapo_loss(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Tensor | Sequence[int],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token_mean",
    max_tokens: int | None = None,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as a sum; divide by the units of the whole update, over all ranks and micro-batches.

    logp:        (N,) log-probs of the response tokens under the policy, nats, with gradient.
    old:         (N,) the same under the policy the step started with, without gradient.
    advantages:  (S,) one per sequence.
    lengths:     (S,) response tokens of each sequence, all >= 1; S = 0 gives a loss of 0.
    dual_clip:   largest loss per token in units of |A| where A < 0; None is without.
    aggregation: its units are tokens, sequences, or sequences * max_tokens (`fixed_length`).
    max_tokens:  longest response that could have been sampled, for `fixed_length` alone.
    weights:     (N,) importance weights of the tokens, without gradient; None is 1.
    keep:        (N,) bool, False for a rejected token, which is in neither the sum nor the units, as if it had not
                 been sampled. A sequence counts as a unit while it has a kept token.

    Returns the scalar sum and statistics without gradient, each a scalar tensor: `ratio_sum` and `ratio_count` (over
    tokens), `clip_low_count`, `clip_high_count` and with a dual clip `dual_clip_count` (tokens that lost their gradient
    to each), `units` (add them over micro-batches and ranks) and `ratio_max`, `abs_log_ratio_max` (take the maximum).
    Raises ValueError for an empty sequence or shapes that do not fit.
    """
    sizes = check_lengths(lengths, logp=logp, old=old, weights=weights, keep=keep)
    if advantages.shape != (len(sizes),):
        raise ValueError(f"advantages is {tuple(advantages.shape)}, but there are {len(sizes)} sequences")
    sizes, left, (logp, old, weights) = kept_tokens(keep, sizes, logp, old, weights)
    units = count_units(sizes, aggregation, max_tokens)
    advantage = per_token(advantages.detach().to(logp.dtype)[left.to(advantages.device)], sizes)
    log_ratio = logp - old.detach()
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantage < 0, torch.minimum(losses, -advantage * dual_clip), losses)
    if weights is not None:
        losses = losses * weights.detach()
    loss = aggregate(losses, sizes, aggregation)

    ratio, log_ratio, zero = ratio.detach(), log_ratio.detach(), logp.new_zeros(())
    stats = {
        "ratio_sum": ratio.sum(),
        "ratio_count": zero + ratio.numel(),
        "ratio_max": ratio.max() if sizes else zero,
        "clip_low_count": ((ratio < 1 - clip_low) & (advantage < 0)).sum().to(logp.dtype),
        "clip_high_count": ((ratio > 1 + clip_high) & (advantage > 0)).sum().to(logp.dtype),
        "abs_log_ratio_max": log_ratio.abs().max() if sizes else zero,
        "units": zero + units,
    }
    if dual_clip is not None:
        bounded = (ratio.clamp(min=1 - clip_low) > dual_clip) & (advantage < 0)
        stats["dual_clip_count"] = bounded.sum().to(logp.dtype)
    return loss, stats


def overlong_penalty(length: int, limit: int, buffer: int, scale: float = 1.0) -> float:
    """The soft overlong punishment (equation 13), to be added to a response's reward: 0 up to `limit - buffer` tokens,
    falling linearly to -scale at `limit`, and -scale beyond. A buffer of 0 is off.

    Raises ValueError for a buffer that does not lie within 0 and `limit`.
    """
    if not 0 <= buffer <= limit:
        raise ValueError(f"an overlong buffer of {buffer} tokens does not lie within 0 and the limit of {limit}")
    if not buffer:
        return 0.0
    return -scale * min(max(length - (limit - buffer), 0) / buffer, 1.0)
