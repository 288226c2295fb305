"""GSPO, k3 and cross-entropy against closed forms, finite differences, and TRL."""

import math

import pytest
import torch

from omnitrain.algorithms import gspo, sft
from omnitrain.algorithms.gspo import gspo_loss
from omnitrain.algorithms.kl import k3, kl_loss
from omnitrain.algorithms.sft import sft_loss

LENGTHS = [9, 4, 7, 1, 9, 3]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.7, 0.0, 2.0], dtype=torch.float64)
LOW, HIGH = 3e-4, 4e-4


def packed(seed=0, scale=5e-4):
    """Log-probs with gradient, old and reference log-probs, all (33,) float64."""
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) * 0.5 - 1
    old = logp + torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) * scale
    ref = logp + torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) * 0.1
    return logp.requires_grad_(), old, ref


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("scale", [0.0, 5e-4, 0.3])
def test_loss_and_gradient_equal_trls(beta, scale, trl):
    logp, old, ref = packed(scale=scale)
    ours, stats = gspo_loss(logp, old, ADVANTAGES, LENGTHS, clip_low=LOW, clip_high=HIGH)
    ours = (ours + beta * kl_loss(logp, ref, LENGTHS)[0]) / stats["units"]
    theirs = trl.grpo(
        logp, old, ADVANTAGES, LENGTHS, ref=ref, beta=beta, level="sequence", loss_type="grpo", low=LOW, high=HIGH
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logp), gradient(theirs, logp), rtol=1e-12, atol=1e-14)
    if scale == 5e-4:
        assert stats["clip_low_count"] + stats["clip_high_count"] > 0, "nothing was clipped, so clipping was not tested"


def test_gradient_is_the_closed_form():
    logp, old, _ = packed()
    loss, stats = gspo_loss(logp, old, ADVANTAGES, LENGTHS, clip_low=LOW, clip_high=HIGH)
    expected, clipped = [], 0
    sequences = zip(logp.detach().split(LENGTHS), old.split(LENGTHS), ADVANTAGES.tolist(), strict=True)
    for now, before, advantage in sequences:
        ratio = math.exp((now - before).mean())
        off = (ratio < 1 - LOW and advantage < 0) or (ratio > 1 + HIGH and advantage > 0)
        clipped += off
        expected += [0.0 if off else -advantage * ratio / len(now)] * len(now)
    torch.testing.assert_close(gradient(loss, logp).tolist(), expected, rtol=1e-10, atol=1e-15)
    assert stats["clip_low_count"] + stats["clip_high_count"] == clipped > 0


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_minus_advantage_over_length():
    logp, _, _ = packed()
    loss, stats = gspo_loss(logp, logp.detach(), ADVANTAGES, LENGTHS)
    assert stats["ratio_sum"] == len(LENGTHS) and stats["ratio_max"] == 1 and stats["abs_log_ratio_max"] == 0
    assert loss.item() == pytest.approx(-ADVANTAGES.sum().item(), abs=1e-12)
    lengths = torch.tensor(LENGTHS)
    torch.testing.assert_close(gradient(loss, logp), (-ADVANTAGES / lengths).repeat_interleave(lengths))


def test_gradcheck():
    def sequence_form(logp, old):
        """The definition, differentiable through the ratio itself; the loss's own stop-gradients hide it from
        finite differences."""
        ratio = torch.stack([d.mean() for d in (logp - old).split(LENGTHS)]).exp()
        return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(1 - LOW, 1 + HIGH)).sum()

    logp, old, ref = packed(scale=1e-2)
    assert torch.autograd.gradcheck(lambda x: sequence_form(x, old), (logp,), eps=1e-7)
    loss, _ = gspo_loss(logp, old, ADVANTAGES, LENGTHS, clip_low=LOW, clip_high=HIGH)
    torch.testing.assert_close(loss, sequence_form(logp, old), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(loss, logp), gradient(sequence_form(logp, old), logp), rtol=1e-9, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, ref, LENGTHS)[0], (logp,))
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, LENGTHS)[0], (logp,))


@pytest.mark.parametrize(
    "shards", [[[3], [5, 0, 1, 4, 2]], [[0, 1, 2], [3, 4, 5]], [[i] for i in range(6)], [[], [0, 1, 2, 3, 4, 5]]]
)
def test_the_sum_over_any_shards_is_the_whole(shards):
    logp, old, ref = packed()

    def losses(order):
        pieces = [[x.split(LENGTHS)[i] for i in order] for x in (logp, old, ref)]
        now, before, reference = (torch.cat(piece) if order else logp[:0] for piece in pieces)
        lengths = [LENGTHS[i] for i in order]
        return (
            gspo_loss(now, before, ADVANTAGES[order], lengths, clip_low=LOW, clip_high=HIGH),
            kl_loss(now, reference, lengths),
            sft_loss(now, lengths),
        )

    whole, parts = losses(list(range(6))), [losses(shard) for shard in shards]
    for index, (loss, stats) in enumerate(whole):
        total = sum(part[index][0] for part in parts)
        torch.testing.assert_close(total, loss, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(gradient(total, logp), gradient(loss, logp), rtol=1e-13, atol=1e-15)
        for name, value in stats.items():
            gathered = torch.stack([part[index][1][name] for part in parts])
            combined = gathered.max() if name.endswith("_max") else gathered.sum()
            torch.testing.assert_close(combined, value, rtol=1e-13, atol=1e-15)
            assert not value.requires_grad


def test_a_packed_sequence_gets_the_same_bits_whatever_its_neighbours():
    logp, old, _ = (x.detach().float() for x in packed())
    alone = [gspo_loss(*[x.split(LENGTHS)[i] for x in (logp, old)], ADVANTAGES[[i]], [LENGTHS[i]])[0] for i in range(6)]
    for i in range(6):
        zeroed = torch.where(torch.arange(6) == i, ADVANTAGES, 0.0)
        assert gspo_loss(logp, old, zeroed, LENGTHS)[0] == alone[i]


def test_an_empty_micro_batch_has_a_loss_of_zero_that_can_be_differentiated():
    logp = torch.zeros(4, requires_grad=True)
    none = logp[:0]
    for loss, stats in (gspo_loss(none, none, none, []), kl_loss(none, none, []), sft_loss(none, [])):
        assert loss.item() == 0 and stats["units"] == 0
        assert gradient(loss, logp).tolist() == [0.0] * 4


def test_an_empty_response_is_an_error_that_names_it():
    logp = torch.zeros(4)
    for call in (
        lambda: gspo_loss(logp, logp, torch.zeros(3), [2, 0, 2]),
        lambda: kl_loss(logp, logp, torch.tensor([2, 0, 2])),
        lambda: sft_loss(logp, [2, 0, 2]),
    ):
        with pytest.raises(ValueError, match="sequence 1 has 0 response tokens"):
            call()


def test_shapes_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match="old is"):
        gspo_loss(torch.zeros(4), torch.zeros(3), torch.zeros(2), [2, 2])
    with pytest.raises(ValueError, match="advantages is"):
        gspo_loss(torch.zeros(4), torch.zeros(4), torch.zeros(3), [2, 2])


def test_a_huge_ratio_is_clamped_and_stays_finite():
    logp = torch.zeros(3, requires_grad=True)
    loss, stats = gspo_loss(logp, torch.full((3,), -500.0), torch.tensor([-1.0]), [3])
    assert loss.item() == pytest.approx(math.exp(10), rel=1e-5) and stats["abs_log_ratio_max"] == 500
    assert torch.isfinite(gradient(loss, logp)).all()


def test_k3_is_never_negative_and_zero_only_where_policy_and_reference_agree():
    logp, _, ref = packed()
    assert (k3(logp, ref) > 0).all() and (k3(logp, logp) == 0).all()


def test_k3_estimates_the_kl_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), (p * (p / q).log()).sum())


def test_sft_per_token_is_the_cross_entropy_of_a_language_model():
    logits = torch.randn(sum(LENGTHS), 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (sum(LENGTHS),))
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    loss, stats = sft_loss(logp, LENGTHS)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(loss / stats["units"], expected)
    torch.testing.assert_close(gradient(loss / stats["units"], logits), gradient(expected, logits))


def test_units_are_sequences_for_gspo_and_tokens_for_sft():
    assert gspo.units(LENGTHS) == 6 and sft.units(LENGTHS) == 33 and sft.units(torch.tensor(LENGTHS)) == 33
