"""A rank that writes the pre-clip gradients of one DPO update over fixed pairs, planned for the ranks there are: once
against the adapter switched off, once against log-probs given beforehand.

Usage under torchrun: pairs.py MODEL DATA OUT
"""

import sys

import torch
from torch.distributed.tensor import DTensor

from omnitrain.data.files import RowFiles
from omnitrain.data.sample import Sample
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.models.qwen3_omni.spec import Lora, Qwen3OmniModel
from omnitrain.recipe.algorithms import Dpo
from omnitrain.train.distributed import init_ranks
from omnitrain.train.objectives import DpoObjective
from omnitrain.train.updates import plan_updates, run_update
from tests.integration.workers.gradients import perturb


def main(model: str, data: str, out: str) -> None:
    torch.set_num_threads(1)
    ranks = init_ranks()
    rows = RowFiles([data])
    processing = Processing(model, system=None, max_prompt_tokens=512)
    spec = Qwen3OmniModel(family="qwen3_omni", path=model, dtype="float32", lora=Lora(rank=4, alpha=8))
    policy = ThinkerPolicy(spec, mesh=ranks.mesh, device=ranks.device, seed=0, gradient_checkpointing=True)
    perturb(policy)
    samples = []
    for row in rows:
        for child, text in enumerate((row.chosen, row.rejected)):
            ids, tokens = processing.encode(row).ids, processing.response_ids(text)
            samples.append(Sample(row.index, row.index, child, ids, tokens, [], "stop"))
    (update,) = plan_updates(
        samples, updates=1, units=lambda s: len(s) // 2, max_tokens=400, ranks=ranks, key=(0, 1), together=True
    )
    found = {"plans": ranks.gather([[(s.row, s.child) for s in b.samples] for b in update.batches if not b.filler])}
    for reference in ("adapter", "precomputed"):
        for sample in samples if reference == "precomputed" else ():
            sample.reference_sum = -3.0 * len(sample.tokens)
        objective = DpoObjective(Dpo(kind="dpo", label_smoothing=0.1, reference=reference))
        run_update(policy, objective, update, lambda index: processing.encode(rows[index]), 1.0, ranks.world)
        for name, parameter in policy.trainable():
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[f"{reference} {name}"] = whole.clone()
            parameter.grad = None
    if ranks.main:
        torch.save(found, out)
    ranks.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
