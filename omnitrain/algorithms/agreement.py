"""How far the trainer's log-probs are from the rollout engine's, on the tokens the engine sampled.

Both sides are log-probs of the same tokens under the same temperature, so any difference is a
difference of weights, kernels or prompts. The names are those of the metrics and of gate G6.
"""

import torch
from torch import Tensor


def agreement(trainer: Tensor, rollout: Tensor, lengths: list[int] | None = None) -> dict[str, float]:
    """Compare two flat vectors of token log-probs, in nats.

    trainer, rollout: shape (N,), every sequence's tokens one after the other.
    lengths: tokens per sequence, summing to N; None takes the whole as one sequence.

    Returns
      pearson       correlation of the token probabilities exp(logp); 1 is equal
      abs_mean      mean |trainer - rollout|
      abs_max       max |trainer - rollout|
      k3            KL(rollout || trainer) per token, mean of r - 1 - log r with r = exp(trainer - rollout)
      log_ppl_diff  log perplexity of the trainer minus the engine's, mean over sequences (signed)

    Without tokens every value is NaN. A side whose probabilities do not vary has no correlation:
    pearson is then 1 if the sides are equal within 1e-6 and 0 if they are not. A log-prob that is
    not finite gives pearson 0 and the others as they come out, so that a threshold refuses it.
    Raises ValueError when the shapes or the lengths do not fit.
    """
    if trainer.ndim != 1 or trainer.shape != rollout.shape:
        raise ValueError(f"trainer {tuple(trainer.shape)} and rollout {tuple(rollout.shape)} must be equal (N,)")
    count = trainer.numel()
    lengths = [count] if lengths is None else [n for n in lengths if n]
    if sum(lengths) != count:
        raise ValueError(f"lengths sum to {sum(lengths)}, there are {count} tokens")
    if count == 0:
        return dict.fromkeys(("pearson", "abs_mean", "abs_max", "k3", "log_ppl_diff"), float("nan"))
    # float64: with probabilities near 1 the correlation is a ratio of tiny sums.
    trainer, rollout = trainer.detach().double().cpu(), rollout.detach().double().cpu()
    delta = trainer - rollout
    per_sequence = torch.stack([part.mean() for part in delta.split(lengths)])
    return {
        "pearson": _pearson(trainer.exp(), rollout.exp()),
        "abs_mean": delta.abs().mean().item(),
        "abs_max": delta.abs().max().item(),
        "k3": (torch.expm1(delta) - delta).mean().item(),
        "log_ppl_diff": -per_sequence.mean().item(),
    }


def _pearson(x: Tensor, y: Tensor) -> float:
    x_centred, y_centred = x - x.mean(), y - y.mean()
    scale = x_centred.norm() * y_centred.norm()
    if not torch.isfinite(scale):
        return 0.0
    if scale <= 1e-12 * len(x):
        return float(torch.allclose(x, y, rtol=0, atol=1e-6))
    return (x_centred @ y_centred / scale).item()
