"""DAPO's loss, its aggregations, dual clip and overlong penalty against TRL, closed forms and themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.algorithms.dapo import dapo_loss, overlong_penalty
from omnitrain.algorithms.gspo import gspo_loss
from omnitrain.algorithms.kl import kl_loss
from omnitrain.algorithms.packed import count_units

LENGTHS = [9, 4, 7, 1, 9, 3]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.7, 0.0, 2.0], dtype=torch.float64)
AGGREGATIONS = ["token_mean", "sequence_mean", "fixed_length"]


def packed(scale=0.3, seed=0):
    """Log-probs with gradient, old and reference log-probs, all (33,) float64."""
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) * 0.5 - 1
    old = logp + torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) * scale
    ref = logp + torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) * 0.1
    return logp.requires_grad_(), old, ref


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def limit(aggregation):
    return 16 if aggregation == "fixed_length" else None


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("scale, dual_clip", [(0.0, None), (0.3, None), (1.5, 1.5)])
@pytest.mark.parametrize(
    "aggregation, loss_type",
    [("token_mean", "dapo"), ("token_mean", "bnpo"), ("sequence_mean", "grpo"), ("fixed_length", "dr_grpo")],
)
def test_loss_and_gradient_equal_trls(aggregation, loss_type, scale, dual_clip, beta, trl):
    logp, old, ref = packed(scale)
    kind = {"aggregation": aggregation, "max_tokens": limit(aggregation)}
    ours, stats = dapo_loss(logp, old, ADVANTAGES, LENGTHS, dual_clip=dual_clip, **kind)
    ours = (ours + beta * kl_loss(logp, ref, LENGTHS, **kind)[0]) / stats["units"]
    theirs = trl.grpo(
        logp, old, ADVANTAGES, LENGTHS, ref=ref, beta=beta, loss_type=loss_type, delta=dual_clip, max_tokens=16
    )
    close(ours, theirs)
    close(gradient(ours, logp), gradient(theirs, logp))
    if scale:
        assert stats["clip_low_count"] > 0 and stats["clip_high_count"] > 0, "nothing was clipped"
    if dual_clip:
        assert stats["dual_clip_count"] > 0, "the dual clip bounded nothing"


def test_gradient_is_the_closed_form():
    logp, old, _ = packed()
    loss, stats = dapo_loss(logp, old, ADVANTAGES, LENGTHS)
    expected, low, high = [], 0, 0
    for now, before, advantage in zip(logp.detach().split(LENGTHS), old.split(LENGTHS), ADVANTAGES.tolist()):
        for ratio in (now - before).exp().tolist():
            below, above = ratio < 0.8 and advantage < 0, ratio > 1.28 and advantage > 0
            low, high = low + below, high + above
            expected.append(0.0 if below or above else -advantage * ratio)
    torch.testing.assert_close(gradient(loss, logp).tolist(), expected, rtol=1e-12, atol=1e-15)
    assert (stats["clip_low_count"], stats["clip_high_count"], stats["units"]) == (low, high, 33)
    assert stats["ratio_sum"] == pytest.approx((logp - old).exp().sum().item()) and stats["ratio_count"] == 33


def test_clip_higher_leaves_more_room_above_than_below():
    logp = torch.tensor([1.25, 1.29, 0.79], dtype=torch.float64).log().requires_grad_()
    old = torch.zeros(3, dtype=torch.float64)
    loss, _ = dapo_loss(logp, old, torch.tensor([1.0, 1.0, -1.0]), [1, 1, 1])
    assert gradient(loss, logp).tolist() == pytest.approx([-1.25, 0.0, 0.0])


def test_dual_clip_bounds_what_a_negative_advantage_can_cost_and_nothing_else():
    logp = torch.tensor([10.0, 10.0, 2.0], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([-2.0, 2.0, -2.0], dtype=torch.float64)
    loss, stats = dapo_loss(logp, torch.zeros_like(logp), advantages, [1, 1, 1], dual_clip=3.0)
    assert loss.item() == pytest.approx(2 * 3 - 2 * 1.28 + 2 * 2) and stats["dual_clip_count"] == 1
    assert gradient(loss, logp).tolist() == pytest.approx([0.0, 0.0, 4.0])


def test_a_huge_ratio_stays_finite():
    for advantage in (1.0, -1.0):
        logp = torch.zeros(3, requires_grad=True)
        loss, stats = dapo_loss(logp, torch.full((3,), -500.0), torch.tensor([advantage]), [3])
        assert torch.isfinite(loss) and torch.isfinite(gradient(loss, logp)).all()
        assert stats["abs_log_ratio_max"] == 500


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "shards", [[[3], [5, 0, 1, 4, 2]], [[0, 1, 2], [3, 4, 5]], [[i] for i in range(6)], [[], [0, 1, 2, 3, 4, 5]]]
)
def test_the_sum_over_any_ranks_and_micro_batches_is_the_whole(aggregation, shards):
    logp, old, ref = packed()
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(33, dtype=torch.float64, generator=generator)
    keep = torch.rand(33, generator=generator) > 0.3
    tokens = (logp, old, ref, weights, keep)
    kind = {"aggregation": aggregation, "max_tokens": limit(aggregation)}

    def losses(order):
        flat = [[x.split(LENGTHS)[i] for i in order] for x in tokens]
        now, before, reference, w, k = (torch.cat(part) if order else x[:0] for part, x in zip(flat, tokens))
        lengths = [LENGTHS[i] for i in order]
        return (
            dapo_loss(now, before, ADVANTAGES[order], lengths, weights=w, keep=k, dual_clip=3.0, **kind),
            kl_loss(now, reference, lengths, keep=k, **kind),
            gspo_loss(now, before, ADVANTAGES[order], lengths, weights=w, keep=k),
        )

    whole, parts = losses(list(range(6))), [losses(shard) for shard in shards]
    for index, (loss, stats) in enumerate(whole):
        total = sum(part[index][0] for part in parts)
        close(total, loss)
        close(gradient(total, logp), gradient(loss, logp))
        for name, value in stats.items():
            gathered = torch.stack([part[index][1][name] for part in parts])
            close(gathered.max() if name.endswith("_max") else gathered.sum(), value)
            assert not value.requires_grad


def test_the_token_mean_weighs_every_token_of_the_update_the_same():
    logp, old, _ = packed(scale=0.0)
    loss, stats = dapo_loss(logp, old, torch.ones(6, dtype=torch.float64), LENGTHS)
    close(gradient(loss / stats["units"], logp), torch.full((33,), -1 / 33, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=33, max_size=33), st.sampled_from([*AGGREGATIONS, "gspo"]))
def test_rejected_tokens_are_as_if_they_had_not_been_sampled(kept, aggregation):
    logp, old, ref = packed()
    keep = torch.tensor(kept)
    lengths = [int(part.sum()) for part in keep.split(LENGTHS)]
    left = [i for i, n in enumerate(lengths) if n]
    fewer = [lengths[i] for i in left]
    if aggregation == "gspo":
        kl_kind, loss, kind = {}, gspo_loss, {}
    else:
        kind = kl_kind = {"aggregation": aggregation, "max_tokens": limit(aggregation)}
        loss = dapo_loss
    found, stats = loss(logp, old, ADVANTAGES, LENGTHS, keep=keep, **kind)
    expected, wanted = loss(logp[keep], old[keep], ADVANTAGES[left], fewer, **kind)
    close(found, expected)
    assert stats == wanted
    assert (gradient(found, logp)[~keep] == 0).all()
    close(kl_loss(logp, ref, LENGTHS, keep=keep, **kl_kind)[0], kl_loss(logp[keep], ref[keep], fewer, **kl_kind)[0])


def test_a_rejected_sequence_is_no_unit_and_one_with_a_single_kept_token_is():
    logp, old, _ = packed()
    keep = torch.ones(33, dtype=torch.bool)
    keep[:9] = False
    keep[9:12] = False  # of the second sequence's four tokens the last stays
    counts = [
        dapo_loss(logp, old, ADVANTAGES, LENGTHS, keep=keep, aggregation=a, max_tokens=limit(a))[1]["units"]
        for a in AGGREGATIONS
    ]
    assert counts == [21, 5, 5 * 16]
    assert gspo_loss(logp, old, ADVANTAGES, LENGTHS, keep=keep)[1]["units"] == 5


def test_with_everything_rejected_loss_and_gradient_are_zero():
    logp, old, ref = packed()
    keep = torch.zeros(33, dtype=torch.bool)
    for loss, stats in (
        dapo_loss(logp, old, ADVANTAGES, LENGTHS, keep=keep),
        gspo_loss(logp, old, ADVANTAGES, LENGTHS, keep=keep),
        kl_loss(logp, ref, LENGTHS, keep=keep),
    ):
        assert loss.item() == 0 and stats["units"] == 0 and (gradient(loss, logp) == 0).all()


@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "gspo"])
def test_a_weight_scales_its_tokens_gradient_and_gets_none_itself(aggregation):
    logp, old, _ = packed(scale=0.0)
    weights = torch.rand(33, dtype=torch.float64).requires_grad_()
    if aggregation == "gspo":
        loss, kind = gspo_loss, {}
    else:
        loss, kind = dapo_loss, {"aggregation": aggregation, "max_tokens": limit(aggregation)}
    plain = gradient(loss(logp, old, ADVANTAGES, LENGTHS, **kind)[0], logp)
    weighted = loss(logp, old, ADVANTAGES, LENGTHS, weights=weights, **kind)[0]
    close(gradient(weighted, logp), plain * weights.detach())
    assert torch.autograd.grad(weighted, weights, allow_unused=True)[0] is None


@pytest.mark.parametrize("weights", ["token", "sequence"])
@pytest.mark.parametrize(
    "aggregation, loss_type, level",
    [("token_mean", "dapo", "token"), ("sequence_mean", "grpo", "token"), ("gspo", "grpo", "sequence")],
)
def test_a_weighted_loss_with_kl_equals_trls(aggregation, loss_type, level, weights, trl):
    logp, old, ref = packed()
    rows = torch.rand(6, 9 if weights == "token" else 1, dtype=torch.float64) * 2
    flat = torch.cat([row.expand(9)[:n] for row, n in zip(rows, LENGTHS)])
    if aggregation == "gspo":
        ours, stats = gspo_loss(logp, old, ADVANTAGES, LENGTHS, clip_low=0.2, clip_high=0.28, weights=flat)
        kl = kl_loss(logp, ref, LENGTHS)[0]
    else:
        ours, stats = dapo_loss(logp, old, ADVANTAGES, LENGTHS, aggregation=aggregation, weights=flat)
        kl = kl_loss(logp, ref, LENGTHS, aggregation=aggregation)[0]
    ours = (ours + 0.04 * kl) / stats["units"]
    theirs = trl.grpo(
        logp, old, ADVANTAGES, LENGTHS, ref=ref, beta=0.04, loss_type=loss_type, level=level, weights=rows
    )
    close(ours, theirs)
    if (aggregation, weights) != ("gspo", "token"):  # there TRL spreads a token's weight over its sequence
        close(gradient(ours, logp), gradient(theirs, logp))


def test_units_that_cannot_be_counted_are_errors():
    with pytest.raises(ValueError, match='"fixed_length" alone takes it'):
        count_units([3], "fixed_length")
    with pytest.raises(ValueError, match="alone takes it"):
        count_units([3], "token_mean", 8)
    with pytest.raises(ValueError, match="9 tokens is longer than max_tokens = 8"):
        count_units([9], "fixed_length", 8)
    with pytest.raises(ValueError, match='unknown aggregation "mean"'):
        count_units([3], "mean")
    assert count_units([], "fixed_length", 8) == 0


def test_shapes_that_do_not_fit_are_errors():
    logp = torch.zeros(4)
    with pytest.raises(ValueError, match="advantages is"):
        dapo_loss(logp, logp, torch.zeros(3), [2, 2])
    with pytest.raises(ValueError, match="keep is"):
        dapo_loss(logp, logp, torch.zeros(2), [2, 2], keep=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="weights is"):
        gspo_loss(logp, logp, torch.zeros(2), [2, 2], weights=torch.ones(2))


@pytest.mark.parametrize(
    "length, penalty",
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_the_overlong_penalty_falls_over_the_papers_last_4096_tokens(length, penalty):
    assert overlong_penalty(length, 20480, 4096) == pytest.approx(penalty)
    assert overlong_penalty(length, 20480, 4096, 0.5) == pytest.approx(penalty / 2)
    assert overlong_penalty(length, 20480, 0) == 0.0


@given(st.integers(1, 100), st.integers(1, 50), st.integers(0, 50))
def test_the_overlong_penalty_never_rises_and_stays_within_the_scale(limit, buffer, more):
    if buffer > limit:
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(1, limit, buffer)
        return
    values = [overlong_penalty(n, limit, buffer, 2.0) for n in range(limit + more + 1)]
    assert values == sorted(values, reverse=True) and values[0] == 0.0
    assert values[limit] == -2.0 and min(values) == -2.0 and values[limit - buffer] == 0.0
    assert math.isclose(values[limit - buffer + 1], -2.0 / buffer)
