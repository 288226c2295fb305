"""DPO and IPO against the closed form and TRL."""

import math

import pytest
import torch

from omnitrain.algorithms.dpo import dpo_loss, dpo_pairs, response_logprobs

BETA = 0.1
LENGTHS = [5, 3, 1, 7, 4, 4]
"""Three chosen responses, then three rejected ones: TRL's order."""


def pairs(seed=0, count=5):
    """Log-probs of chosen and rejected responses with gradient, and of both under the reference."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(count, dtype=torch.float64, generator=generator) * 3 for _ in range(4)]
    return values[0].requires_grad_(), values[1].requires_grad_(), values[2], values[3]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_sigmoid_and_its_gradient_are_the_closed_form(smoothing):
    chosen, rejected, ref_chosen, ref_rejected = pairs()
    loss, stats = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=BETA, label_smoothing=smoothing)
    total, slopes = 0.0, []
    for c, r, rc, rr in zip(*(x.tolist() for x in (chosen, rejected, ref_chosen, ref_rejected)), strict=True):
        d = BETA * ((c - rc) - (r - rr))
        total += (1 - smoothing) * math.log1p(math.exp(-d)) + smoothing * math.log1p(math.exp(d))
        slopes.append(BETA * (-(1 - smoothing) / (1 + math.exp(d)) + smoothing / (1 + math.exp(-d))))
    assert loss.item() == pytest.approx(total, rel=1e-12) and stats["units"] == 5
    found = torch.autograd.grad(loss, (chosen, rejected))
    assert found[0].tolist() == pytest.approx(slopes, rel=1e-11)
    assert found[1].tolist() == pytest.approx([-slope for slope in slopes], rel=1e-11)


def test_ipo_is_the_closed_form_and_smallest_at_a_gap_of_half_over_beta():
    chosen, rejected, ref_chosen, ref_rejected = pairs()
    losses, _ = dpo_pairs(chosen, rejected, ref_chosen, ref_rejected, beta=BETA, kind="ipo")
    gap = (chosen - ref_chosen) - (rejected - ref_rejected)
    assert losses.tolist() == pytest.approx([(h - 1 / (2 * BETA)) ** 2 for h in gap.tolist()])
    zero = torch.zeros(1)
    at_best, _ = dpo_pairs(torch.tensor([1 / (2 * BETA)]), zero, zero, zero, beta=BETA, kind="ipo")
    assert at_best.item() == pytest.approx(0.0)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_loss_and_gradient_equal_trls(kind, trl):
    """TRL takes IPO of the mean log-prob per token, and sigmoid of the sum. Its sigmoid has no label smoothing."""
    logp = (torch.randn(sum(LENGTHS), dtype=torch.float64) - 1).requires_grad_()
    ref = torch.randn(sum(LENGTHS), dtype=torch.float64) - 1
    theirs = trl.dpo(logp, torch.stack([p.sum() for p in ref.split(LENGTHS)]), LENGTHS, loss_type=kind, beta=BETA)
    turns = [0, 3, 1, 4, 2, 5]
    mine, before = (torch.cat([x.split(LENGTHS)[i] for i in turns]) for x in (logp, ref))
    lengths = [LENGTHS[i] for i in turns]
    whole = [response_logprobs(x, lengths, average=kind == "ipo") for x in (mine, before)]
    loss, stats = dpo_loss(*whole[0], *whole[1], beta=BETA, kind=kind)
    ours = loss / stats["units"]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    slopes = [torch.autograd.grad(x, logp)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-14)


def test_statistics_are_sums_over_pairs_in_the_units_of_rewards():
    chosen, rejected = torch.tensor([-1.0, -5.0], requires_grad=True), torch.tensor([-2.0, -3.0])
    loss, stats = dpo_loss(chosen, rejected, torch.tensor([-2.0, -4.0]), torch.tensor([-2.0, -4.0]), beta=0.5)
    assert {name: pytest.approx(value.item()) for name, value in stats.items()} == {
        "accuracy_sum": 1.0,  # D = 0.5 and -1.0
        "margin_sum": -0.5,
        "chosen_reward_sum": 0.0,  # 0.5 and -0.5
        "rejected_reward_sum": 0.5,
        "units": 2.0,
    }
    assert loss.requires_grad and not any(value.requires_grad for value in stats.values())


def test_a_policy_equal_to_its_reference_has_a_loss_of_log_2_and_no_right_pair():
    chosen, rejected, *_ = pairs()
    loss, stats = dpo_loss(chosen, rejected, chosen.detach(), rejected.detach())
    assert loss.item() / 5 == pytest.approx(math.log(2)) and stats["accuracy_sum"] == stats["margin_sum"] == 0


def test_the_reference_gets_no_gradient():
    chosen, rejected, ref_chosen, ref_rejected = pairs()
    ref_chosen.requires_grad_()
    loss, _ = dpo_loss(chosen, rejected, ref_chosen, ref_rejected)
    assert torch.autograd.grad(loss, ref_chosen, allow_unused=True)[0] is None


def test_the_sum_over_any_shards_is_the_whole():
    values = pairs(count=7)
    whole, stats = dpo_loss(*values, label_smoothing=0.1)
    parts = [dpo_loss(*(x[a:b] for x in values), label_smoothing=0.1) for a, b in ((0, 1), (1, 1), (1, 7))]
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    for name, value in stats.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), value)


def test_responses_are_summed_or_averaged_and_split_into_their_turns():
    logp = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    chosen, rejected = response_logprobs(logp, [1, 2, 2, 1])
    assert (chosen.tolist(), rejected.tolist()) == ([-1.0, -9.0], [-5.0, -6.0])
    chosen, rejected = response_logprobs(logp, torch.tensor([1, 2, 2, 1]), average=True)
    assert (chosen.tolist(), rejected.tolist()) == ([-1.0, -4.5], [-2.5, -6.0])


def test_what_cannot_be_pairs_is_an_error():
    logp = torch.zeros(3)
    with pytest.raises(ValueError, match="3 responses are not pairs"):
        response_logprobs(logp, [1, 1, 1])
    with pytest.raises(ValueError, match="sequence 1 has 0 response tokens"):
        response_logprobs(logp, [3, 0])
    with pytest.raises(ValueError, match="same"):
        dpo_loss(logp, logp[:2], logp, logp)
    with pytest.raises(ValueError, match="label_smoothing"):
        dpo_loss(logp, logp, logp, logp, kind="ipo", label_smoothing=0.1)
    with pytest.raises(ValueError, match="unknown"):
        dpo_loss(logp, logp, logp, logp, kind="hinge")
