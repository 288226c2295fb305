"""DPO, Direct Preference Optimization (arXiv 2305.18290, equation 7), and IPO (arXiv 2310.12036, equation 17).

    h       = (logp_chosen - ref_chosen) - (logp_rejected - ref_rejected),    D = beta h
    sigmoid = -(1 - e) log sigmoid(D) - e log sigmoid(-D)                     e: label smoothing
    ipo     = (h - 1 / (2 beta))^2

Log-probs are those of whole responses: summed over tokens in DPO. For IPO the mean over tokens keeps the squared loss
from growing with the length, which is what its authors used. beta 0.1 is the papers'.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from omnitrain.algorithms.packed import check_lengths, sequence_means, sequence_sums


def response_logprobs(logp: Tensor, lengths: Tensor | Sequence[int], *, average: bool = False) -> tuple[Tensor, Tensor]:
    """(N,) token log-probs of chosen and rejected responses in turn -> those of whole responses, (P,) each.

    average: the mean over a response's tokens instead of the sum.
    Raises ValueError for an empty response, an odd number of responses or shapes that do not fit.
    """
    sizes = check_lengths(lengths, logp=logp)
    if len(sizes) % 2:
        raise ValueError(f"{len(sizes)} responses are not pairs of a chosen and a rejected one")
    whole = (sequence_means if average else sequence_sums)(logp, sizes)
    return whole[0::2], whole[1::2]


def dpo_pairs(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of every pair, (P,), and of every pair without gradient, (P,) each: `accuracy` (1 where D > 0),
    `margin` (D), `chosen_reward` and `rejected_reward` (beta times the log ratio to the reference).

    chosen, rejected:         (P,) log-probs of the responses under the policy, nats, with gradient.
    ref_chosen, ref_rejected: (P,) the same under the reference, without gradient.
    Raises ValueError for shapes that differ, an unknown kind, or label smoothing with "ipo", which has none.
    """
    if not chosen.shape == rejected.shape == ref_chosen.shape == ref_rejected.shape or chosen.ndim != 1:
        shapes = [tuple(x.shape) for x in (chosen, rejected, ref_chosen, ref_rejected)]
        raise ValueError(f"chosen, rejected and their references must all be the same (P,), not {shapes}")
    if kind == "ipo" and label_smoothing:
        raise ValueError(f"label_smoothing = {label_smoothing} has no meaning in ipo")
    chosen_ratio, rejected_ratio = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    h = chosen_ratio - rejected_ratio
    if kind == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)
    elif kind == "ipo":
        losses = (h - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f'unknown kind "{kind}"')
    return losses, {
        "accuracy": (h.detach() > 0).to(h.dtype),
        "margin": beta * h.detach(),
        "chosen_reward": beta * chosen_ratio.detach(),
        "rejected_reward": beta * rejected_ratio.detach(),
    }


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over pairs; divide by the pairs of the whole update, over all ranks. Arguments as in `dpo_pairs`.

    Returns the scalar sum and statistics without gradient, to be added over micro-batches and ranks: `accuracy_sum`,
    `margin_sum`, `chosen_reward_sum`, `rejected_reward_sum` and `units` (pairs).
    """
    losses, values = dpo_pairs(
        chosen, rejected, ref_chosen, ref_rejected, beta=beta, label_smoothing=label_smoothing, kind=kind
    )
    stats = {f"{name}_sum": value.sum() for name, value in values.items()}
    return losses.sum(), stats | {"units": losses.new_zeros(()) + len(losses)}
