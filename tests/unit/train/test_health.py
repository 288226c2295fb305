"""A step's numbers by the modality of its prompts."""

import math

import pytest

from omnitrain.data.sample import Sample
from omnitrain.train.health import modality_metrics
from omnitrain.train.metrics import METRICS, family

MODALITIES = ("text", "text", "video+audio")


def samples(rewards: list[list[float]]) -> list[Sample]:
    """Two tokens each; a group for each list."""
    return [
        Sample(group, group, child, [1, 2], [3, 4], [-0.5, -1.0 - child], "stop", reward=reward)
        for group, row in enumerate(rewards)
        for child, reward in enumerate(row)
    ]


def found(trained, rewards=([0.0, 1.0], [2.0, 2.0], [1.0, 1.0])):
    return modality_metrics(samples(list(rewards)), lambda sample: MODALITIES[sample.row], trained)


def test_k6_the_gap_between_engine_and_trainer_is_told_by_modality():
    given = samples([[0.0, 1.0], [2.0, 2.0], [1.0, 1.0]])
    trained = {(s.group, s.child): [x - 0.1 * (s.group == 2) for x in s.logprobs] for s in given}
    values = found(trained)
    assert values["modality/text/logp_diff_mean"] == 0 and values["modality/text/pearson"] == pytest.approx(1)
    assert values["modality/video+audio/logp_diff_mean"] == pytest.approx(0.1)
    assert all(family(name) in METRICS for name in values)


def test_rewards_and_groups_that_teach_nothing_are_told_by_modality():
    values = found({})
    assert (values["modality/text/samples"], values["modality/video+audio/samples"]) == (4, 2)
    assert (values["modality/text/zero_std_ratio"], values["modality/video+audio/zero_std_ratio"]) == (0.5, 1.0)
    assert values["modality/text/reward_mean"] == 1.25 and values["modality/video+audio/reward_std"] == 0
    assert values["modality/text/reward_std"] == pytest.approx(math.sqrt(11) / 4)
    assert not [name for name in values if "pearson" in name]  # nothing was compared


def test_a_step_of_one_modality_repeats_nothing():
    assert modality_metrics(samples([[0.0, 1.0]]), lambda sample: "text", {}) == {}
