import math

import pytest

from omnitrain.data.sample import Sample
from omnitrain.evaluation.validation import summarise

KINDS = {"choice": "choice", "math": "math", "mmk12": "mmk12", "length": "length", "math_2": "python"}


def sample(task, rewards, failed=False):
    found = Sample(row=0, group=0, child=0, prompt_ids=[], tokens=[], logprobs=[], finish_reason="stop", text=task)
    found.rewards, found.failed, found.reward = rewards, failed, math.nan if failed else sum(rewards.values())
    return found


def summary(*samples):
    return summarise(list(samples), lambda s: s.text, KINDS)


def test_accuracy_is_of_the_reward_that_scores_the_tasks_rows():
    found = summary(
        sample("avqa", {"choice": 1.0, "length": -0.5}),
        sample("avqa", {"choice": 0.0}),
        sample("gsm8k", {"length": -1.0, "math": 1.0}),
        sample("essay", {"length": -1.0, "math_2": 1.0}),
    )
    assert found["val/avqa/accuracy"] == 0.5 and found["val/gsm8k/accuracy"] == 1.0
    assert found["val/avqa/reward"] == 0.25 and found["val/essay/rows"] == 1
    assert "val/essay/accuracy" not in found


@pytest.mark.parametrize("accuracy", [0, 1])
@pytest.mark.parametrize("form", [0, 0.5, 1])
def test_accuracy_of_mmk12_is_its_part_of_right_and_wrong(accuracy, form):
    found = summary(sample("mmk12", {"mmk12": (accuracy + 0.3 * form) / 1.3}))
    assert found["val/mmk12/accuracy"] == accuracy


def test_failed_samples_are_in_no_mean():
    found = summary(sample("avqa", {"choice": 1.0}), sample("avqa", {}, failed=True))
    assert found == {"val/avqa/accuracy": 1.0, "val/avqa/reward": 1.0, "val/avqa/rows": 1}
