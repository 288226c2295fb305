"""Supervised fine-tuning: cross-entropy of the target response.

    loss = - sum_i sum_t logp_it

Divided by the update's target tokens, this is the token-mean over the whole update: every target token
weighs the same, whatever sequence, micro-batch or rank it is in. It is the loss of any causal language model.
"""

from collections.abc import Sequence

from torch import Tensor

from omnitrain.algorithms.packed import check_lengths


def units(lengths: Tensor | Sequence[int]) -> int:
    """What the loss is summed over, so what to divide by: target tokens."""
    return int(sum(int(n) for n in lengths))


def sft_loss(logp: Tensor, lengths: Tensor | Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood summed over tokens; divide by the tokens of the whole update, over all ranks.

    logp:    (N,) log-probs of the target tokens, nats, with gradient.
    lengths: (S,) target tokens of each sequence, all >= 1.

    Returns the scalar sum and statistics without gradient, to be added over micro-batches and ranks: `nll_sum`
    and `units` (tokens). Raises ValueError for an empty sequence or shapes that do not fit.
    """
    sizes = check_lengths(lengths, logp=logp)
    loss = -logp.sum()
    return loss, {"nll_sum": loss.detach(), "units": logp.new_zeros(()) + sum(sizes)}
