"""From samples and a recipe's algorithm to advantages, units and a loss."""

import math

import pytest
import torch

from omnitrain.algorithms.advantages import group_advantages
from omnitrain.algorithms.correction import correction
from omnitrain.algorithms.dapo import dapo_loss
from omnitrain.algorithms.dpo import dpo_loss
from omnitrain.algorithms.gspo import gspo_loss
from omnitrain.algorithms.kl import kl_loss
from omnitrain.data.sample import Sample
from omnitrain.recipe.algorithms import Correction, Dapo, Dpo, Gspo
from omnitrain.train.objectives import Batch, DapoObjective, DpoObjective, GspoObjective, SftObjective

LENGTHS = [4, 2, 3, 1]


def sample(group, child, reward, tokens=3, *, failed=False, **rewards):
    values = rewards or ({} if failed else {"math": reward})
    return Sample(0, group, child, [1], [2] * tokens, [], "stop", rewards=values, failed=failed, reward=reward)


def group(*rewards, index=0, tokens=3):
    return [sample(index, child, reward, tokens) for child, reward in enumerate(rewards)]


def advantages(samples):
    return [s.advantage for s in samples]


def expected(rewards, **options):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)), **options)[
        0
    ].tolist()


def gspo(**fields):
    return GspoObjective(Gspo(kind="gspo", **fields), {"math": 1.0, "format": 0.5})


def dapo(max_new_tokens=8, **fields):
    return DapoObjective(Dapo(kind="dapo", **fields), {"math": 1.0, "format": 0.5}, max_new_tokens=max_new_tokens)


def batch(**fields):
    """Ten tokens of four sequences: log-probs with gradient, and the batch around them."""
    generator = torch.Generator().manual_seed(0)
    logp = (torch.randn(10, dtype=torch.float64, generator=generator) - 1).requires_grad_()
    noise = lambda: torch.randn(10, dtype=torch.float64, generator=generator) * 0.3  # noqa: E731
    values = {"old": logp.detach() + noise(), "reference": None, "rollout": logp.detach() + noise()}
    scale = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    return logp, Batch(torch.tensor(LENGTHS), scale, **values | fields)


def _kept_sequences(keep):
    return sum(bool(part.any()) for part in keep.split(LENGTHS))


def same(found, wanted, leaf):
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-14)
    slopes = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (found[0], wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-14)


# -- advantages


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_advantage_switches_of_the_recipe_are_used(std, leave_one_out):
    samples = group(1.0, 0.0, 0.0, 0.5)
    assert gspo(advantage_std=std, leave_one_out=leave_one_out).assign_advantages(samples) == {}
    assert advantages(samples) == expected([1.0, 0.0, 0.0, 0.5], std=std, leave_one_out=leave_one_out)


@pytest.mark.parametrize("combine", ["reward", "advantage"])
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("make", [gspo, dapo])
def test_r2_a_failed_sample_is_in_no_mean_and_gets_no_advantage(make, leave_one_out, combine):
    samples = group(1.0, 0.0, 0.0, 0.5, 0.25, 1.0, 0.0)
    samples.insert(3, sample(0, 7, math.nan, failed=True))
    make(combine=combine, leave_one_out=leave_one_out).assign_advantages(samples)
    assert samples.pop(3).advantage == 0
    assert advantages(samples) == expected([1.0, 0.0, 0.0, 0.5, 0.25, 1.0, 0.0], leave_one_out=leave_one_out)


def test_combined_advantages_are_weighted_and_a_reward_absent_by_source_is_left_out():
    samples = [
        sample(0, 0, 1.0, math=1.0, format=0.0),
        sample(0, 1, 0.5, math=0.0, format=1.0),
        sample(1, 0, 2.0, math=2.0),
        sample(1, 1, 0.0, math=0.0),
    ]
    gspo(combine="advantage").assign_advantages(samples)
    unit = expected([1.0, 0.0])[0]
    second = expected([2.0, 0.0])[0]
    assert advantages(samples) == pytest.approx([unit - 0.5 * unit, 0.5 * unit - unit, second, -second])


def test_the_overlong_penalty_is_in_the_advantage_and_leaves_the_task_reward():
    samples = [sample(0, child, 1.0, tokens) for child, tokens in enumerate((2, 6, 8))]
    samples.append(sample(0, 3, math.nan, 8, failed=True))
    values = dapo(overlong_buffer=4, overlong_penalty=0.5).assign_advantages(samples)
    assert advantages(samples) == pytest.approx([*expected([1.0, 0.75, 0.5]), 0.0])
    assert [s.reward for s in samples[:3]] == [1.0] * 3
    assert [s.rewards["overlong_penalty"] for s in samples[:3]] == [0.0, -0.25, -0.5]
    assert values == {"train/overlong_penalty": -0.25}
    again = advantages(samples)
    dapo(overlong_buffer=4, overlong_penalty=0.5).assign_advantages(samples)
    assert advantages(samples) == again, "a second call must not add it twice"


def test_with_combined_advantages_a_small_overlong_penalty_stays_small():
    samples = [sample(0, child, float(child % 2), tokens) for child, tokens in enumerate((4, 4, 4, 5))]
    dapo(overlong_buffer=4, overlong_penalty=0.04, combine="advantage").assign_advantages(samples)
    plain = expected([0.0, 1.0, 0.0, 1.0])
    penalty = [0.0025, 0.0025, 0.0025, -0.0075]
    assert advantages(samples) == pytest.approx([a + b for a, b in zip(plain, penalty)])


def test_a_step_without_samples_has_no_advantages():
    for combine in ("reward", "advantage"):
        assert dapo(overlong_buffer=4, combine=combine).assign_advantages([]) == {}
        assert dapo(combine=combine).keep_groups([]) == set()


# -- dynamic sampling


def test_dynamic_sampling_keeps_groups_that_differ_in_the_task_reward_before_the_penalty():
    samples = group(1.0, 0.0) + group(1.0, 1.0, index=1) + group(0.0, 0.5, index=3)
    samples[2].tokens, samples[3].tokens = [2] * 8, [2]  # lengths that would be penalised differently
    samples += [sample(4, 0, 1.0), sample(4, 1, math.nan, failed=True), *group(math.nan, index=5)]
    samples[-1].failed = True
    objective = dapo(overlong_buffer=4)
    assert objective.keep_groups(samples) == {0, 3}
    objective.assign_advantages(samples)
    assert objective.keep_groups(samples) == {0, 3}, "the same after the penalties are known"
    assert objective.most_draws == 10 and dapo(max_generation_batches=3).most_draws == 3


def test_with_combined_advantages_one_reward_that_differs_keeps_a_group():
    samples = [sample(0, 0, 1.0, math=1.0, format=0.0), sample(0, 1, 1.0, math=0.5, format=1.0)]
    assert dapo().keep_groups(samples) == set() and dapo(combine="advantage").keep_groups(samples) == {0}


def test_without_dynamic_sampling_every_group_is_kept_and_drawn_once():
    samples = group(1.0, 1.0) + group(0.0, 1.0, index=2)
    for objective in (dapo(dynamic_sampling=False), gspo()):
        assert objective.keep_groups(samples) == {0, 2} and objective.most_draws == 1


# -- units and losses


def test_units_are_what_the_aggregation_divides_by_without_failed_samples():
    samples = [sample(0, 0, 1.0, 4), sample(0, 1, 0.0, 2), sample(0, 2, math.nan, 5, failed=True)]
    assert gspo().units(samples) == 2
    units = {a: dapo(aggregation=a).units(samples) for a in ("token_mean", "sequence_mean", "fixed_length")}
    assert units == {"token_mean": 6, "sequence_mean": 2, "fixed_length": 16}
    pair = [sample(0, 0, 1.0, 4), sample(0, 1, 0.0, 2)]
    assert DpoObjective(Dpo(kind="dpo")).units(pair + pair) == 2 and SftObjective().units(pair) == 6


def test_dapo_loss_takes_every_setting_of_the_recipe():
    logp, given = batch(reference=torch.full((10,), -1.0, dtype=torch.float64))
    settings = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2, "aggregation": "fixed_length"}
    found = dapo(kl=0.3, **settings).loss(logp, given)
    wanted, stats = dapo_loss(logp, given.old, given.advantages, LENGTHS, max_tokens=8, **settings)
    kl, _ = kl_loss(logp, given.reference, LENGTHS, aggregation="fixed_length", max_tokens=8)
    same(found, wanted + 0.3 * kl, logp)
    assert found[1]["kl_sum"] == kl and found[1]["units"] == stats["units"] == 32
    assert dapo(kl=0.3).needs_reference and not dapo().needs_reference


def test_without_old_log_probs_the_current_ones_are_taken():
    for objective in (gspo(), dapo()):
        logp, given = batch(old=None)
        assert objective.loss(logp, given)[1]["abs_log_ratio_max"] == 0


@pytest.mark.parametrize("make, loss", [(gspo, gspo_loss), (dapo, dapo_loss)])
def test_a_correction_compares_the_frozen_policy_with_the_engine(make, loss):
    settings = {"weights": "sequence", "limit": "mask", "reject": "token", "reject_high": 0.05}
    objective = make(correction=Correction(**settings), kl=0.1)
    logp, given = batch(reference=torch.full((10,), -1.0, dtype=torch.float64))
    weights, keep, _ = correction(given.old, given.rollout, LENGTHS, **settings)
    assert 0 < keep.sum() < 10 and len(weights.unique()) > 1
    clip = {"clip_low": objective.spec.clip_low, "clip_high": objective.spec.clip_high}
    wanted, stats = loss(logp, given.old, given.advantages, LENGTHS, weights=weights, keep=keep, **clip)
    kind = {"aggregation": "token_mean"} if make is dapo else {}
    wanted = wanted + 0.1 * kl_loss(logp, given.reference, LENGTHS, keep=keep, **kind)[0]
    found = objective.loss(logp, given)
    same(found, wanted, logp)
    assert found[1]["units"] == stats["units"] == (keep.sum() if make is dapo else _kept_sequences(keep))
    assert found[1]["correction_rejected_count"] == (~keep).sum()
    assert objective.needs_rollout and objective.rejects


def test_with_one_update_per_step_the_correction_takes_the_current_policy_as_the_frozen_one():
    logp, given = batch(old=None)
    objective = dapo(correction=Correction(weights="token"))
    weights, _, _ = correction(logp, given.rollout, LENGTHS, weights="token")
    same(objective.loss(logp, given), dapo_loss(logp, logp, given.advantages, LENGTHS, weights=weights)[0], logp)
    assert objective.needs_rollout and not objective.rejects


def test_with_the_bypass_rejection_compares_the_current_policy_with_the_engine():
    logp, given = batch()
    given.old = given.rollout
    objective = dapo(old_logprobs="rollout", correction=Correction(reject="sequence", reject_high=0.035))
    _, keep, _ = correction(logp, given.rollout, LENGTHS, reject="sequence", reject_high=0.035)
    assert 0 < keep.sum() < 10
    found = objective.loss(logp, given)
    same(found, dapo_loss(logp, given.rollout, given.advantages, LENGTHS, keep=keep)[0], logp)
    assert found[1]["units"] == keep.sum()


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("fields", [{"label_smoothing": 0.1}, {"loss": "ipo", "beta": 0.5}])
def test_dpo_takes_pairs_in_turn_and_a_reference_of_tokens_or_of_whole_responses(fields, average):
    reference = torch.linspace(-3, -1, 10, dtype=torch.float64)
    logp, given = batch(reference=reference)
    objective = DpoObjective(Dpo(kind="dpo", average_logprobs=average, **fields))
    whole = [[x.mean() if average else x.sum() for x in flat.split(LENGTHS)] for flat in (logp, reference)]
    (chosen, rejected), (ref_chosen, ref_rejected) = ((torch.stack(w[0::2]), torch.stack(w[1::2])) for w in whole)
    options = {"beta": fields.get("beta", 0.1), "label_smoothing": fields.get("label_smoothing", 0.0)}
    kind = fields.get("loss", "sigmoid")
    wanted, stats = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, kind=kind, **options)
    found = objective.loss(logp, given)
    same(found, wanted, logp)
    assert found[1].keys() == stats.keys() and stats["units"] == 2
    torch.testing.assert_close(found[1], stats)
    losses, values = objective.pairs(logp, given)
    assert losses.sum() == found[0] and values["margin"].sum() == found[1]["margin_sum"] and len(losses) == 2
    sums = torch.stack([x.sum() for x in reference.split(LENGTHS)])
    same(objective.loss(logp, Batch(given.lengths, given.advantages, reference_sums=sums)), wanted, logp)


def test_dpo_runs_the_reference_unless_it_was_computed_beforehand():
    assert DpoObjective(Dpo(kind="dpo")).needs_reference
    assert not DpoObjective(Dpo(kind="dpo", reference="precomputed")).needs_reference


def test_offline_objectives_read_no_rollout_and_reject_nothing():
    for objective in (DpoObjective(Dpo(kind="dpo")), SftObjective()):
        assert not objective.needs_rollout and not objective.rejects


def test_dapo_without_a_length_limit_where_it_needs_one_is_an_error():
    for fields in ({"overlong_buffer": 4}, {"aggregation": "fixed_length"}):
        with pytest.raises(ValueError, match="need max_new_tokens"):
            dapo(max_new_tokens=None, **fields)
