"""KL divergence to the reference, per token, by the low-variance estimator k3.

    k3 = exp(d) - d - 1,  d = logp_ref - logp

(Schulman, "Approximating KL Divergence", 2020; equation 4 of GRPO, arXiv 2402.03300.) It is never
negative and its gradient is taken as it stands.
"""

from collections.abc import Sequence

from torch import Tensor

from omnitrain.algorithms.packed import Aggregation, aggregate, check_lengths, count_units, kept_tokens


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """Per-token estimate in nats, in the shape of `logp`; `ref` gets no gradient."""
    d = ref.detach() - logp
    return d.exp() - d - 1


def kl_loss(
    logp: Tensor,
    ref: Tensor,
    lengths: Tensor | Sequence[int],
    *,
    aggregation: Aggregation = "sequence_mean",
    max_tokens: int | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """k3, aggregated like the policy loss it is added to: the default is GSPO's, the mean over each sequence's tokens.

    logp, ref: (N,) log-probs of the response tokens under the policy and the reference, nats.
    lengths:   (S,) response tokens of each sequence, all >= 1.
    aggregation, max_tokens, keep: as in `dapo_loss`; a rejected token is in neither the sum nor the units.

    Returns the scalar sum (multiply by the recipe's `algorithm.kl`, divide by the update's units) and
    statistics without gradient: `kl_sum` and `units` (add them over micro-batches and ranks).
    Raises ValueError for an empty sequence or shapes that do not fit.
    """
    sizes = check_lengths(lengths, logp=logp, ref=ref, keep=keep)
    sizes, _, (logp, ref) = kept_tokens(keep, sizes, logp, ref)
    units = count_units(sizes, aggregation, max_tokens)
    loss = aggregate(k3(logp, ref), sizes, aggregation)
    return loss, {"kl_sum": loss.detach(), "units": logp.new_zeros(()) + units}
