"""KL divergence to the reference, per token, by the low-variance estimator k3.

    k3 = exp(d) - d - 1,  d = logp_ref - logp

(Schulman, "Approximating KL Divergence", 2020; equation 4 of GRPO, arXiv 2402.03300.) It is never
negative and its gradient is taken as it stands.
"""

from collections.abc import Sequence

from torch import Tensor

from omnitrain.algorithms.packed import check_lengths, sequence_means


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """Per-token estimate in nats, in the shape of `logp`; `ref` gets no gradient."""
    d = ref.detach() - logp
    return d.exp() - d - 1


def kl_loss(logp: Tensor, ref: Tensor, lengths: Tensor | Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """k3, averaged over each sequence's tokens and summed over sequences: GSPO's units.

    logp, ref: (N,) log-probs of the response tokens under the policy and the reference, nats.
    lengths:   (S,) response tokens of each sequence, all >= 1.

    Returns the scalar sum (multiply by the recipe's `algorithm.kl`, divide by the update's sequences) and
    statistics without gradient: `kl_sum` and `units` (add them over micro-batches and ranks).
    Raises ValueError for an empty sequence or shapes that do not fit.
    """
    sizes = check_lengths(lengths, logp=logp, ref=ref)
    loss = sequence_means(k3(logp, ref), sizes).sum() if sizes else logp.sum()
    return loss, {"kl_sum": loss.detach(), "units": logp.new_zeros(()) + len(sizes)}
