"""AdamW, the learning-rate schedule, and the clipped step."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from omnitrain.errors import RunError
from omnitrain.recipe.schema import Train


def build_optimizer(parameters: list[Parameter], spec: Train, total_updates: int) -> tuple[AdamW, LambdaLR]:
    """AdamW over `parameters` and its schedule. Warm-up and decay count updates."""
    optimizer = AdamW(parameters, lr=spec.learning_rate, betas=tuple(spec.betas), weight_decay=spec.weight_decay)

    def factor(update: int) -> float:
        if update < spec.warmup_updates:
            return (update + 1) / spec.warmup_updates
        done = (update - spec.warmup_updates) / max(1, total_updates - spec.warmup_updates)
        done = min(1.0, done)
        if spec.schedule == "linear":
            return 1.0 - done
        if spec.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0

    return optimizer, LambdaLR(optimizer, factor)


def clipped_step(optimizer: Optimizer, scheduler: LambdaLR, max_norm: float, learned: bool = True) -> float:
    """Clip by the global gradient norm, step, clear the gradients. Returns the norm before clipping.

    With `learned` false every sample was rejected: the schedule moves on and the weights stay.

    Raises:
        RunError: the norm is not finite. Nothing was stepped: the weights are those of before, on all ranks.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = norm.item()
    if not math.isfinite(norm):
        raise RunError(
            f"the gradient norm is {norm}, so the update was not made and the last checkpoint is good; lower "
            "train.learning_rate, look for rewards or media of extreme size, and see the last lines of metrics.jsonl"
        )
    if learned:
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
