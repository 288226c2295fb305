"""Group-relative advantages: how much better a response is than the others to the same prompt.

    A_i = (r_i - b_i) / (std_g + eps)

with b_i the mean reward of the group (GRPO, arXiv 2402.03300), or of the group without i
(leave-one-out, RLOO, arXiv 2402.14740), and std_g the group's standard deviation with ddof 1.
`std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). eps = 1e-6 is GSPO's and DAPO's.
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
    if mask is None:
        mask = torch.ones_like(rewards, dtype=torch.bool)
    if rewards.ndim != 1 or rewards.shape != groups.shape or rewards.shape != mask.shape:
        shapes = f"rewards {tuple(rewards.shape)}, groups {tuple(groups.shape)} and mask {tuple(mask.shape)}"
        raise ValueError(f"{shapes} must all be the same (N,)")
    mask = mask.bool()
    if not torch.isfinite(rewards[mask]).all():
        raise ValueError("a kept reward is not finite; mask failed samples out")
    advantages = torch.zeros_like(rewards)
    kept_groups = groups[mask].unique().tolist()
    flat = 0
    for group in kept_groups:
        members = mask & (groups == group)
        values = rewards[members].double()
        # Compared, not computed: the mean of equal floats can miss them by an ulp, which eps would blow up.
        if values.min() == values.max():
            flat += 1
            continue
        count = len(values)
        baseline = (values.sum() - values) / (count - 1) if leave_one_out else values.mean()
        result = values - baseline
        if std:
            result = result / (values.std(correction=1) + eps)
        advantages[members] = result.to(rewards.dtype)
    return advantages, flat / len(kept_groups) if kept_groups else 0.0
