import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.algorithms.advantages import combined_advantages, group_advantages, varied_groups

NAN = float("nan")


def test_two_groups_are_normalised_each_by_its_own_mean_and_std():
    rewards = torch.tensor([1.0, 0.0, 10.0, 30.0, 20.0], dtype=torch.float64)
    advantages, flat = group_advantages(rewards, torch.tensor([7, 7, 3, 3, 3]))
    half = 0.5 / (0.5**0.5 + 1e-6)
    expected = torch.tensor([half, -half, -10 / (10 + 1e-6), 10 / (10 + 1e-6), 0.0], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    assert flat == 0.0


def test_groups_may_be_interleaved():
    rewards, groups = torch.rand(12, dtype=torch.float64), torch.arange(12) % 3
    order = torch.randperm(12)
    advantages, _ = group_advantages(rewards, groups)
    shuffled, _ = group_advantages(rewards[order], groups[order])
    torch.testing.assert_close(shuffled, advantages[order], rtol=0, atol=1e-14)


def test_r2_a_failed_reward_is_in_no_mean_and_no_std_and_gets_no_advantage():
    rewards = torch.tensor([1.0, 0.0, NAN, 1.0, 0.0, float("inf")])
    mask = torch.tensor([True, True, False, True, True, False])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages, flat = group_advantages(rewards, groups, mask)
    clean, _ = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    assert advantages.tolist() == [*clean.tolist(), 0.0, *clean.tolist(), 0.0] and flat == 0.0


def test_r2_a_kept_reward_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, NAN]), torch.tensor([0, 0]))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e6])
def test_equal_rewards_teach_nothing_whatever_their_rounding(value):
    rewards = torch.full((7,), value)
    advantages, flat = group_advantages(rewards, torch.zeros(7, dtype=torch.long))
    assert advantages.tolist() == [0.0] * 7 and flat == 1.0


def test_flat_groups_are_counted_among_the_groups_with_a_kept_sample():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0, NAN, NAN, NAN])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])  # varied, equal, one kept, none kept
    _, flat = group_advantages(rewards, groups, torch.isfinite(rewards))
    assert flat == pytest.approx(2 / 3)
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long))[1] == 0.0


def test_without_std_the_advantage_is_the_distance_to_the_mean():
    advantages, _ = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4), std=False)
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_takes_the_mean_of_the_others():
    advantages, _ = group_advantages(torch.tensor([3.0, 0.0, 6.0]), torch.zeros(3), std=False, leave_one_out=True)
    assert advantages.tolist() == [0.0, -4.5, 4.5]


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\)"):
        group_advantages(torch.zeros(2), torch.zeros(3))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5), st.booleans()), min_size=1, max_size=30),
    st.booleans(),
    st.booleans(),
)
def test_every_group_sums_to_zero_and_keeps_the_order_of_its_rewards(samples, std, leave_one_out):
    groups, rewards, mask = (torch.tensor(column) for column in zip(*samples, strict=True))
    advantages, _ = group_advantages(rewards.double(), groups, mask, std=std, leave_one_out=leave_one_out)
    assert (advantages[~mask] == 0).all()
    for group in groups[mask].unique():
        kept = mask & (groups == group)
        assert abs(advantages[kept].sum()) < 1e-9
        order = rewards[kept].argsort()
        assert (advantages[kept][order].diff() >= -1e-9).all()


def _eight_with_one_failed():
    rewards = torch.tensor([1.0, 0.0, 0.5, NAN, 1.0, 0.0, 0.25, 0.75], dtype=torch.float64)
    return rewards, torch.zeros(8, dtype=torch.long), torch.isfinite(rewards)


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_r2_one_nan_of_eight_leaves_the_advantages_of_the_other_seven_as_without_it(leave_one_out, std):
    rewards, groups, mask = _eight_with_one_failed()
    options = {"std": std, "leave_one_out": leave_one_out}
    clean, _ = group_advantages(rewards[mask], groups[mask], **options)
    advantages, flat = group_advantages(rewards, groups, mask, **options)
    assert advantages[mask].tolist() == clean.tolist() and advantages[3] == 0 and flat == 0
    combined, flat = combined_advantages(rewards[None], torch.ones(1).double(), groups, mask, **options)
    assert combined.tolist() == advantages.tolist() and flat == 0


def test_r2_a_sample_that_failed_is_in_no_rewards_mean_with_several_combined():
    rewards, groups, mask = _eight_with_one_failed()
    other = torch.arange(8, dtype=torch.float64)  # finite on the failed sample too
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    advantages, _ = combined_advantages(torch.stack([rewards, other]), weights, groups, mask)
    expected = sum(w * group_advantages(r[mask], groups[mask])[0] for w, r in zip(weights, (rewards, other)))
    assert advantages[mask].tolist() == expected.tolist() and advantages[3] == 0


def test_combined_advantages_give_a_reward_that_varies_little_as_much_say_as_its_weight():
    rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.001, 0.0, 0.0, 0.001]], dtype=torch.float64)
    weights, groups = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    unit = 0.5 / torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64).std()
    advantages, _ = combined_advantages(rewards, weights, groups, eps=0.0)
    expected = unit * torch.tensor([3.0, -3.0, -1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected)
    summed, _ = group_advantages((weights[:, None] * rewards).sum(0), groups)
    assert (summed[0] > 0.86) and (summed[2] > 0.86), "the weighted sum would have drowned the second reward"


def test_a_reward_that_does_not_score_a_group_adds_nothing_there():
    rewards = torch.tensor([[1.0, 0.0, NAN, NAN], [NAN, NAN, 0.0, 5.0]], dtype=torch.float64)
    groups, weights = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 3.0], dtype=torch.float64)
    advantages, flat = combined_advantages(rewards, weights, groups, present=torch.isfinite(rewards))
    own = group_advantages(torch.tensor([1.0, 0.0, 0.0, 5.0], dtype=torch.float64), groups)[0]
    assert advantages.tolist() == [own[0], own[1], 3 * own[2], 3 * own[3]] and flat == 0


def test_with_several_rewards_a_group_is_flat_if_none_of_those_with_a_weight_varies():
    rewards = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 2.0]])
    groups = torch.tensor([0, 0, 1, 1])
    assert combined_advantages(rewards, torch.tensor([1.0, 1.0]), groups)[1] == 0.5
    assert combined_advantages(rewards, torch.tensor([1.0, 0.0]), groups)[1] == 1.0


def test_shapes_of_several_rewards_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\(K, N\) and \(K,\)"):
        combined_advantages(torch.zeros(2, 3), torch.ones(3), torch.zeros(3))


def test_dynamic_sampling_keeps_groups_with_unequal_rewards_among_the_samples_that_did_not_fail():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0, NAN, NAN, NAN, 0.1, 0.1, 0.3])
    groups = torch.tensor([7, 7, 1, 1, 2, 2, 3, 3, 4, 4, 4])  # varied, equal, one kept, none kept, varied
    assert varied_groups(rewards, groups, torch.isfinite(rewards)) == [4, 7]
    masked = torch.isfinite(rewards) & (torch.arange(11) != 1)
    assert varied_groups(rewards, groups, masked) == [4], "with one kept sample a group teaches nothing"
    assert varied_groups(torch.zeros(0), torch.zeros(0)) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.booleans()), min_size=1, max_size=20))
def test_a_group_is_kept_just_if_one_of_its_advantages_is_not_zero(samples):
    groups, rewards, mask = (torch.tensor(column) for column in zip(*samples, strict=True))
    advantages, _ = group_advantages(rewards.double(), groups, mask)
    assert varied_groups(rewards.double(), groups, mask) == groups[advantages != 0].unique().tolist()
