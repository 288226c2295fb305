"""Validation: fixed rows in a fixed order, sampled by the run's own engine and scored by its own rewards."""

from __future__ import annotations

from typing import Callable

from omnitrain.data.sample import Sample

CORRECTNESS = {"choice": 1.0, "math": 1.0, "mmk12": 0.5}
"""Kinds of reward that say right or wrong, and the least value of a right answer. Of mmk12 a wrong one has at most
0.3 / 1.3 and a right one at least 1 / 1.3, whatever its form."""


def summarise(samples: list[Sample], task: Callable[[Sample], str], reward_kinds: dict[str, str]) -> dict[str, float]:
    """val/<task>/{accuracy,reward,rows} over scored samples. reward_kinds: the rewards' kinds by name.

    Failed samples are left out of every mean. Accuracy is given where a reward of right or wrong scores the task's rows.
    """
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        if not sample.failed:
            by_task.setdefault(task(sample), []).append(sample)
    values: dict[str, float] = {}
    for name, scored in sorted(by_task.items()):
        values[f"val/{name}/reward"] = sum(s.reward for s in scored) / len(scored)
        values[f"val/{name}/rows"] = len(scored)
        judged = [right for right in (_right(sample, reward_kinds) for sample in scored) if right is not None]
        if judged:
            values[f"val/{name}/accuracy"] = sum(judged) / len(judged)
    return values


def _right(sample: Sample, reward_kinds: dict[str, str]) -> bool | None:
    """What the first of its rewards of right or wrong says; None without one."""
    for name, kind in reward_kinds.items():
        if kind in CORRECTNESS and name in sample.rewards:
            return sample.rewards[name] >= CORRECTNESS[kind]
    return None
