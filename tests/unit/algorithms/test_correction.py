"""Rollout correction against TRL's own, hand-written float64 references, and its properties."""

import ast
import inspect
import math
import textwrap
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.algorithms.agreement import agreement
from omnitrain.algorithms.correction import correction, correction_metrics
from omnitrain.algorithms.dapo import dapo_loss
from omnitrain.algorithms.gspo import gspo_loss

LENGTHS = [5, 1, 7, 3]


def both_sides(scale=0.4, seed=3):
    """The trainer's and the engine's log-probs, (16,) float64."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(sum(LENGTHS), dtype=torch.float64, generator=generator) * 3
    return rollout + torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator) * scale, rollout


def by_hand(trainer, rollout, level, limit, cap, floor):
    """Weights as plain floats."""
    found = []
    for now, then in zip(trainer.split(LENGTHS), rollout.split(LENGTHS), strict=True):
        delta = [a - b for a, b in zip(now.tolist(), then.tolist(), strict=True)]
        for d in delta:
            w = math.exp(sum(delta) if level == "sequence" else d)
            found.append(min(w, cap) if limit == "truncate" else w if floor <= w <= cap else 0.0)
    return found


@pytest.mark.parametrize("limit", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_equal_the_formulas(level, limit):
    trainer, rollout = both_sides()
    weights, keep, stats = correction(trainer, rollout, LENGTHS, weights=level, limit=limit, cap=1.5, floor=0.7)
    expected = by_hand(trainer, rollout, level, limit, 1.5, 0.7)
    assert weights.tolist() == pytest.approx(expected, rel=1e-12) and keep.all()
    items = expected if level == "token" else [expected[sum(LENGTHS[:i])] for i in range(len(LENGTHS))]
    found = correction_metrics(*collected([stats]))
    assert found["correction/weight_mean"] == pytest.approx(sum(items) / len(items))
    assert found["correction/weight_min"] == pytest.approx(min(items))
    assert found["correction/weight_max"] == pytest.approx(max(items))
    squares = sum(w * w for w in items)
    assert found["correction/effective_samples"] == pytest.approx(sum(items) ** 2 / len(items) / squares)
    name, cut = ("truncated", 1.5) if limit == "truncate" else ("masked", 0.0)
    assert found[f"correction/{name}"] == sum(w == cut for w in items) / len(items) > 0


def trls_ratio(mode, trainer, rollout, low, high):
    """The importance weights as TRL's trainer computes them: the very statements of its method."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    method = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))
    blocks = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
        and "vllm_importance_sampling_ratio = torch.exp" in ast.unparse(node)
        and not any(isinstance(child, ast.With) for child in ast.walk(node))
    ]
    assert blocks, "TRL computes its importance weights elsewhere now"

    class Trainer:
        vllm_importance_sampling_mode = mode
        vllm_importance_sampling_clip_min, vllm_importance_sampling_clip_max = low, high

    def padded(flat):
        return torch.nn.utils.rnn.pad_sequence(flat.split(LENGTHS), batch_first=True)

    names = {
        "self": Trainer,
        "torch": torch,
        "math": math,
        "completion_mask": padded(torch.ones(sum(LENGTHS))),
        "tool_mask": None,
        "old_per_token_logps": padded(trainer),
        "sampling_per_token_logps": padded(rollout),
    }
    exec(compile(ast.Module(blocks[0].body, []), "trl", "exec"), names)  # noqa: S102
    rows = names["vllm_importance_sampling_ratio"]
    return torch.cat([row.expand(max(LENGTHS))[:n] for row, n in zip(rows, LENGTHS)])


@pytest.mark.parametrize("limit", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_equal_trls_vllm_correction(level, limit, trl):
    trainer, rollout = both_sides()
    theirs = trls_ratio(f"{level}_{limit}", trainer, rollout, 0.7 if limit == "mask" else None, 1.5)
    ours, _, _ = correction(trainer, rollout, LENGTHS, weights=level, limit=limit, cap=1.5, floor=0.7)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert (ours == (1.5 if limit == "truncate" else 0.0)).any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_rejection_equals_the_formulas(kind, level):
    trainer, rollout = both_sides()
    low, high = (-0.2, 0.2) if kind == "k1" else (0.01, 0.1)
    _, keep, stats = correction(
        trainer, rollout, LENGTHS, reject=level, reject_kl=kind, reject_low=low, reject_high=high
    )
    estimate = {
        "k1": lambda d: -d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(d) - 1 - d,
    }[kind]
    expected = []
    for part in (trainer - rollout).split(LENGTHS):
        values = [estimate(d) for d in part.tolist()]
        if level == "sequence":
            values = [sum(values) / len(values)] * len(values)
        expected += [low <= value <= high for value in values]
    assert keep.tolist() == expected and 0 < sum(expected) < 16
    items = expected if level == "token" else [expected[sum(LENGTHS[:i])] for i in range(len(LENGTHS))]
    assert stats["correction_rejected_count"] == items.count(False)
    assert correction_metrics(*collected([stats])) == {"correction/rejected": items.count(False) / len(items)}


def test_k3_estimates_the_kl_from_engine_to_trainer_as_the_agreement_metric_does():
    trainer, rollout = both_sides()
    bound = agreement(trainer, rollout)["k3"]
    whole = [sum(LENGTHS)]
    for high, kept in ((bound + 1e-9, True), (bound - 1e-9, False)):
        _, keep, _ = correction(trainer, rollout, whole, reject="sequence", reject_kl="k3", reject_high=high)
        assert keep.all() == kept and keep.any() == kept


logps = st.lists(st.floats(-20, 0), min_size=16, max_size=16)
levels = st.sampled_from(["none", "token", "sequence"])


@settings(max_examples=60, deadline=None)
@given(logps, levels, st.sampled_from(["truncate", "mask"]), levels, st.sampled_from(["k1", "k2", "k3"]))
def test_where_trainer_and_engine_agree_weights_are_one_and_nothing_is_rejected(values, level, limit, reject, kind):
    logp = torch.tensor(values, dtype=torch.float64)
    weights, keep, stats = correction(
        logp, logp.clone(), LENGTHS, weights=level, limit=limit, reject=reject, reject_kl=kind,
        reject_low=0.0, reject_high=0.0,
    )  # fmt: skip
    assert (weights == 1).all() and keep.all()
    found = correction_metrics(*collected([stats]))
    assert all(found[f"correction/{n}"] == 0 for n in ("truncated", "masked", "rejected") if f"correction/{n}" in found)
    assert found.get("correction/effective_samples", 1) == 1


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(4)), levels, st.sampled_from(["truncate", "mask"]), levels, st.integers(0, 9))
def test_the_order_of_sequences_and_their_batches_do_not_matter(order, level, limit, reject, seed):
    options = {"weights": level, "limit": limit, "reject": reject, "reject_high": 0.05}
    sides = both_sides(seed=seed)
    weights, keep, stats = correction(*sides, LENGTHS, **options)
    parts = [correction(*(x.split(LENGTHS)[i] for x in sides), [LENGTHS[i]], **options) for i in order]
    for index, whole in ((0, weights), (1, keep)):
        torch.testing.assert_close(
            torch.cat([part[index] for part in parts]), torch.cat([whole.split(LENGTHS)[i] for i in order])
        )
    together, apart = collected([stats]), collected([part[2] for part in parts])
    assert apart[0] == pytest.approx(together[0]) and apart[1] == pytest.approx(together[1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), levels, st.sampled_from(["truncate", "mask"]), levels, st.sampled_from(["dapo", "gspo"]))
def test_a_masked_or_rejected_token_has_no_gradient_and_every_other_one_has(seed, level, limit, reject, algorithm):
    trainer, rollout = both_sides(seed=seed)
    weights, keep, _ = correction(trainer, rollout, LENGTHS, weights=level, limit=limit, reject=reject, reject_high=0.1)
    logp = trainer.clone().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    loss = {"dapo": dapo_loss, "gspo": gspo_loss}[algorithm]
    value, stats = loss(logp, trainer, advantages, LENGTHS, weights=weights, keep=keep)
    slope = torch.autograd.grad(value, logp)[0]
    assert ((slope != 0) == (keep & (weights > 0))).all()
    kept = [bool(part.any()) for part in keep.split(LENGTHS)]
    assert stats["units"] == (keep.sum() if algorithm == "dapo" else sum(kept)), "a masked weight is still a unit"


def test_a_correction_undoes_the_engines_bias_where_its_weights_are_not_limited():
    """Samples drawn from the engine's distribution, weighted, have the trainer's expectation: here exactly, by
    counting every outcome as often as it is drawn."""
    engine = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    trainer = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    value = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    drawn = torch.tensor([0, 0, 1, 2])
    weights, _, _ = correction(trainer.log()[drawn], engine.log()[drawn], [1] * 4, weights="token", cap=10.0)
    assert (weights * value[drawn]).mean().item() == pytest.approx((trainer * value).sum().item())


def test_denoising_steps_are_items_as_tokens_are():
    """A sample of diffusion is a sequence of steps with a log-prob each; all sequences have as many."""
    trainer, rollout = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [-0.5, -0.5, -0.5]])
    weights, keep, _ = correction(
        trainer.flatten(), rollout.flatten(), [3, 3], weights="sequence", cap=100.0, reject="sequence", reject_high=0.1
    )
    assert keep.view(2, 3).tolist() == [[True] * 3, [False] * 3]
    assert weights.view(2, 3)[1].tolist() == pytest.approx([math.exp(1.5)] * 3)


def test_an_enormous_gap_gives_finite_weights_and_bfloat16_sides_are_taken():
    trainer, rollout = torch.tensor([0.0, -400.0]), torch.tensor([-400.0, 0.0])
    weights, _, _ = correction(trainer, rollout, [1, 1], weights="token")
    assert weights.tolist() == [2.0, 0.0]
    weights, _, _ = correction(trainer, rollout, [1, 1], weights="token", limit="mask")
    assert weights.tolist() == [0.0, 0.0]
    weights, _, _ = correction(trainer, rollout.bfloat16(), [2], weights="sequence")
    assert weights.tolist() == [1.0, 1.0] and weights.dtype == torch.float32


def test_weights_and_keep_have_no_gradient():
    trainer, rollout = both_sides()
    weights, keep, stats = correction(
        trainer.requires_grad_(), rollout, LENGTHS, weights="sequence", reject="token", reject_high=0.1
    )
    assert not weights.requires_grad and not any(value.requires_grad for value in stats.values())


def test_a_batch_without_sequences_or_with_everything_rejected_has_statistics_that_can_be_added():
    none, keep, stats = correction(
        torch.zeros(0), torch.zeros(0), [], weights="sequence", reject="sequence", reject_high=1
    )
    assert none.numel() == keep.numel() == 0 and correction_metrics(*collected([stats])) == {}
    trainer, rollout = both_sides()
    *_, rejected = correction(trainer, rollout, LENGTHS, weights="token", reject="token", reject_high=-1.0)
    assert correction_metrics(*collected([stats, rejected])) == {"correction/rejected": 1.0}


def test_bad_log_probs_are_errors():
    with pytest.raises(ValueError, match="engine is not finite"):
        correction(torch.zeros(2), torch.tensor([0.0, math.nan]), [2], weights="token")
    with pytest.raises(ValueError, match="rollout is"):
        correction(torch.zeros(2), torch.zeros(3), [2])
    with pytest.raises(ValueError, match="sequence 0 has 0"):
        correction(torch.zeros(2), torch.zeros(2), [0, 2])


def collected(parts):
    """Statistics of several micro-batches: sums added, maxima taken."""
    sums, maxima = Counter(), {}
    for stats in parts:
        for name, value in stats.items():
            if name.endswith("_max"):
                maxima[name] = max(maxima.get(name, -math.inf), float(value))
            else:
                sums[name] += float(value)
    return dict(sums), maxima
