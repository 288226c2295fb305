import math

import numpy as np
import pytest
import torch

from omnitrain.algorithms.agreement import agreement


def _logp(n, seed=0):
    return -torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 3


def test_equal_sides_agree_perfectly():
    logp = _logp(50)
    found = agreement(logp, logp.clone(), [20, 30])
    assert found == pytest.approx({"pearson": 1.0, "abs_mean": 0, "abs_max": 0, "k3": 0, "log_ppl_diff": 0})


def test_values_equal_the_formulas():
    trainer, rollout = _logp(40, 1), _logp(40, 2)
    found = agreement(trainer, rollout, [10, 30])
    x, y = trainer.double().numpy(), rollout.double().numpy()
    assert found["pearson"] == pytest.approx(np.corrcoef(np.exp(x), np.exp(y))[0, 1])
    assert found["abs_mean"] == pytest.approx(np.abs(x - y).mean())
    assert found["abs_max"] == pytest.approx(np.abs(x - y).max())
    assert found["k3"] == pytest.approx((np.exp(x - y) - 1 - (x - y)).mean())
    ppl = [(y[a:b].mean() - x[a:b].mean()) for a, b in ((0, 10), (10, 40))]
    assert found["log_ppl_diff"] == pytest.approx(np.mean(ppl))


def test_a_token_shift_is_seen():
    logp = _logp(200)
    assert agreement(logp, logp.roll(1))["pearson"] < 0.5


def test_constant_probabilities_have_no_nan():
    assert agreement(torch.zeros(4), torch.zeros(4))["pearson"] == 1.0
    assert agreement(torch.zeros(4), torch.full((4,), -1.0))["pearson"] == 0.0


def test_a_non_finite_log_prob_never_passes_as_agreement():
    rollout = _logp(5)
    trainer = rollout.clone()
    trainer[2] = math.nan
    assert agreement(trainer, rollout)["pearson"] == 0.0


def test_no_tokens_gives_nan_and_wrong_lengths_raise():
    assert math.isnan(agreement(torch.zeros(0), torch.zeros(0), [])["pearson"])
    with pytest.raises(ValueError, match="lengths sum to 3"):
        agreement(torch.zeros(4), torch.zeros(4), [1, 2])
    with pytest.raises(ValueError, match="equal"):
        agreement(torch.zeros(4), torch.zeros(5))
