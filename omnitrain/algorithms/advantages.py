"""Group-relative advantages: how much better a response is than the others to the same prompt.

    A_i = (r_i - b_i) / (std_g + eps)

with b_i the mean reward of the group (GRPO, arXiv 2402.03300), or of the group without i
(leave-one-out, RLOO, arXiv 2402.14740), and std_g the group's standard deviation with ddof 1.
`std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). eps = 1e-6 is GSPO's and DAPO's.

Several rewards: their weighted sum is one reward, or each has advantages of its own, which are then weighted and
added (MixGRPO, arXiv 2507.21802): a reward that varies little then counts as much as one that varies a lot.
"""

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    mask: Tensor | None = None,
    *,
    eps: float = 1e-6,
    std: bool = True,
    leave_one_out: bool = False,
) -> tuple[Tensor, float]:
    """Advantages of N samples, and the share of groups that teach nothing.

    rewards: (N,) float, anything where `mask` is False (a failed reward may be NaN).
    groups:  (N,) int, equal for samples of one prompt; any values, in any order.
    mask:    (N,) bool, False for failed samples: in no mean, no std, and their advantage is 0.

    Returns advantages (N,) in the dtype of `rewards`, and zero_std_ratio: of the groups with a
    kept sample, those with a single one or with equal rewards, whose advantages are exactly 0.
    Raises ValueError for shapes that differ or a kept reward that is not finite.
    """
    mask = _checked(rewards, groups, mask)
    advantages = torch.zeros_like(rewards)
    varied = varied_groups(rewards, groups, mask)
    for group in varied:
        members = mask & (groups == group)
        values = rewards[members].double()
        baseline = (values.sum() - values) / (len(values) - 1) if leave_one_out else values.mean()
        result = values - baseline
        if std:
            result = result / (values.std(correction=1) + eps)
        advantages[members] = result.to(rewards.dtype)
    return advantages, _flat_share(varied, groups, mask)


def combined_advantages(
    rewards: Tensor,
    weights: Tensor,
    groups: Tensor,
    mask: Tensor | None = None,
    present: Tensor | None = None,
    *,
    eps: float = 1e-6,
    std: bool = True,
    leave_one_out: bool = False,
) -> tuple[Tensor, float]:
    """Advantages of N samples under K rewards: each reward's own in the group, weighted and added.

    rewards: (K, N) float.
    weights: (K,) float.
    groups, mask: as in `group_advantages`; a failed sample is in no reward's mean or std.
    present: (K, N) bool, False where a reward does not score that sample's row: it adds nothing there.

    Returns advantages (N,) and zero_std_ratio, where a group teaches nothing if none of its rewards does.
    Raises ValueError for shapes that differ or a kept reward that is not finite.
    """
    if rewards.ndim != 2 or weights.shape != rewards.shape[:1]:
        raise ValueError(f"rewards {tuple(rewards.shape)} and weights {tuple(weights.shape)} must be (K, N) and (K,)")
    if present is None:
        present = torch.ones_like(rewards, dtype=torch.bool)
    mask = torch.ones_like(present[0]) if mask is None else mask.bool()
    total, varied = rewards.new_zeros(rewards.shape[1]), set()
    for reward, weight, scored in zip(rewards, weights, present, strict=True):
        advantages, _ = group_advantages(reward, groups, mask & scored, eps=eps, std=std, leave_one_out=leave_one_out)
        total = total + weight * advantages
        if weight:
            varied |= set(varied_groups(reward, groups, mask & scored))
    return total, _flat_share(varied, groups, mask)


def varied_groups(rewards: Tensor, groups: Tensor, mask: Tensor | None = None) -> list[int]:
    """The groups whose kept rewards are not all equal: the others have no advantage, so they teach nothing. This is
    DAPO's dynamic-sampling filter (arXiv 2503.14476, equation 11). A group with fewer than two kept samples is flat.

    rewards, groups, mask: (N,) as in `group_advantages`. Returns group values in ascending order.
    Raises ValueError for shapes that differ or a kept reward that is not finite.
    """
    mask = _checked(rewards, groups, mask)
    varied = []
    for group in groups[mask].unique().tolist():
        values = rewards[mask & (groups == group)]
        # Compared, not computed: the mean of equal floats can miss them by an ulp, which eps would blow up.
        if values.min() != values.max():
            varied.append(group)
    return varied


def _checked(rewards: Tensor, groups: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        mask = torch.ones_like(rewards, dtype=torch.bool)
    if rewards.ndim != 1 or rewards.shape != groups.shape or rewards.shape != mask.shape:
        shapes = f"rewards {tuple(rewards.shape)}, groups {tuple(groups.shape)} and mask {tuple(mask.shape)}"
        raise ValueError(f"{shapes} must all be the same (N,)")
    mask = mask.bool()
    if not torch.isfinite(rewards[mask]).all():
        raise ValueError("a kept reward is not finite; mask failed samples out")
    return mask


def _flat_share(varied: list[int] | set[int], groups: Tensor, mask: Tensor) -> float:
    """Of the groups with a kept sample, the share that is not among `varied`."""
    count = len(groups[mask].unique())
    return (count - len(varied)) / count if count else 0.0
