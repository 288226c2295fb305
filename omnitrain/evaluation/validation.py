"""Validation: fixed rows in a fixed order, sampled by the run's own engine and scored by its own rewards."""

from __future__ import annotations

from typing import Callable

from omnitrain.data.sample import Sample

# Rewards that say right or wrong; accuracy is the first of them that the recipe has.
CORRECTNESS = ("choice", "math")


def summarise(samples: list[Sample], task: Callable[[Sample], str], reward_names: list[str]) -> dict[str, float]:
    """val/<task>/{accuracy,reward,rows} over scored samples.

    Failed samples are left out of every mean. Accuracy is given where the recipe has a reward of right or wrong.
    """
    correctness = next((name for name in reward_names if name in CORRECTNESS), None)
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        if not sample.failed:
            by_task.setdefault(task(sample), []).append(sample)
    values: dict[str, float] = {}
    for name, scored in sorted(by_task.items()):
        values[f"val/{name}/reward"] = sum(s.reward for s in scored) / len(scored)
        values[f"val/{name}/rows"] = len(scored)
        if correctness:
            values[f"val/{name}/accuracy"] = sum(s.rewards[correctness] >= 1.0 for s in scored) / len(scored)
    return values
