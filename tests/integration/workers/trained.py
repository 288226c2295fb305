"""Run directories as a training leaves them, without the training."""

from pathlib import Path

import torch

from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.spec import Lora, Qwen3OmniModel
from omnitrain.recipe.loader import validated
from omnitrain.recipe.schema import Ema as EmaSettings
from omnitrain.rundir import RunDir
from omnitrain.train.checkpoint import Checkpointer
from omnitrain.train.ema import Ema
from tests.unit.models.conftest import disturb


def recipe(base: Path, lora: Lora | None, **extra):
    model = {"family": "qwen3_omni", "path": str(base), "dtype": "float32"}
    if lora:
        model["lora"] = lora.model_dump()
    return validated(
        {
            "name": "exported",
            "model": model,
            "data": {"train": "none.parquet"},
            "algorithm": {"kind": "sft"},
            "train": {"prompts_per_step": 1, "learning_rate": 1e-3, "max_steps": 2, "ema": {"decay": 0.5}},
            **extra,
        }
    )


def make_policy(path: Path, lora: Lora | None) -> ThinkerPolicy:
    spec = Qwen3OmniModel(family="qwen3_omni", path=str(path), dtype="float32", lora=lora)
    return ThinkerPolicy(spec, mesh=None, device=torch.device("cpu"), seed=0, gradient_checkpointing=False)


def train(folder: Path, base: Path, lora: Lora | None) -> tuple[RunDir, ThinkerPolicy, Ema]:
    """A run directory with checkpoints of steps 1 and 2, whose weights are what two disturbances left."""
    run = RunDir(folder)
    keep_best = {"metric": "val/x/loss", "mode": "min"}
    run.prepare(recipe(base, lora, checkpoint={"keep_best": keep_best}, data={"train": "a.parquet", "validation": "b.parquet"}))
    run.unlock()
    policy = make_policy(base, lora)
    ema = Ema(policy.module, EmaSettings(decay=0.5))
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    checkpointer = Checkpointer(run.checkpoints, keep_last=2, say=lambda line: None)
    for step in (1, 2):
        disturb(policy, 0.05)
        ema.update()
        metrics = {"val/x/loss": float(step)}
        checkpointer.save(step, policy.module, optimizer, scheduler, {"ema": step}, metrics, averages=ema.averages)
    return run, policy, ema
