"""A rank that writes the pre-clip gradients of one update over fixed samples, sharded as told, by algorithm.

Usage under torchrun: gradients.py MODEL DATA OUT SHARDING, SHARDING as "8" or "1,7": samples per rank.
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor

from omnitrain.data.sample import Sample
from omnitrain.data.schema import RowFile
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.models.qwen3_omni.spec import Lora, Qwen3OmniModel
from omnitrain.recipe.algorithms import Correction, Dapo, Gspo
from omnitrain.train.distributed import init_ranks
from omnitrain.train.loop import Loop
from omnitrain.train.objectives import DapoObjective, GspoObjective
from omnitrain.train.updates import MicroBatch, Update, run_update

LORA = Lora(rank=4, alpha=8, targets="attention+experts")


def main(model: str, data: str, out: str, sharding: str) -> None:
    torch.set_num_threads(1)
    ranks = init_ranks()
    rows = RowFile(Path(data))
    processing = Processing(model, system=None, max_prompt_tokens=512)
    spec = Qwen3OmniModel(family="qwen3_omni", path=model, dtype="float32", lora=LORA)
    policy = ThinkerPolicy(spec, mesh=ranks.mesh, device=ranks.device, seed=0, gradient_checkpointing=True)
    perturb(policy)
    draw = random.Random(0)
    samples = []
    for group in range(8):
        tokens = [draw.randrange(500) for _ in range(draw.randrange(1, 12))]
        sample = Sample(group % len(rows), group, 0, [], tokens, [], "stop", advantage=draw.uniform(-2, 2))
        samples.append(sample)
    encode = lambda index: processing.encode(rows[index])  # noqa: E731
    counts = [int(n) for n in sharding.split(",")]
    start = sum(counts[: ranks.rank])
    mine = MicroBatch(samples[start : start + counts[ranks.rank]])
    with torch.no_grad():
        mine.old = policy.logprobs(mine.inputs(encode), 0.9)[0]
        # Old log-probs that differ from the current ones, drawn per sample so that sharding does not matter.
        parts = mine.old.split([len(s.tokens) for s in mine.samples])
        noise = [
            torch.randn(len(p), generator=torch.Generator().manual_seed(s.group)) for s, p in zip(mine.samples, parts)
        ]
        mine.old = torch.cat([p + 1e-3 * n for p, n in zip(parts, noise)])
        # The engine's differ more, so that some tokens are rejected: more on one rank than on another.
        for sample, old, n in zip(mine.samples, mine.old.split([len(p) for p in parts]), noise):
            sample.logprobs = (old + 0.1 * n.square()).tolist()
    correction = Correction(weights="token", reject="token", reject_kl="k1", reject_high=0.2)
    objectives = {
        "gspo": GspoObjective(Gspo(kind="gspo", clip_low=0.2, clip_high=0.2, kl=0.1)),
        "dapo": DapoObjective(Dapo(kind="dapo", kl=0.1, correction=correction)),
    }
    found = {}
    for name, objective in objectives.items():
        for _, parameter in policy.trainable():
            parameter.grad = None
        update = Update(samples, objective.units(samples), [mine])
        stats = run_update(policy, objective, update, encode, 0.9, ranks.world)
        kept = sum(ranks.gather(stats.sums["units"]))
        assert (kept < update.units) == objective.rejects, (name, kept, update.units)
        Loop._leave_out(SimpleNamespace(policy=policy), update.units, kept)
        grads = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in policy.trainable()}
        found[name] = {n: g.clone() for n, g in grads.items()}
    if ranks.main:
        torch.save(found, out)
    ranks.barrier()


@torch.no_grad()
def perturb(policy: ThinkerPolicy) -> None:
    """LoRA B matrices start at zero, where the KL to the reference has no gradient."""
    for index, (_, parameter) in enumerate(policy.trainable()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.1
        if isinstance(parameter, DTensor):
            from torch.distributed.tensor import distribute_tensor

            noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
        parameter.add_(noise)


if __name__ == "__main__":
    main(*sys.argv[1:])
