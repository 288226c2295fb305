"""Rank program of test_engine_ranks.py: torchrun ... engines.py MODEL ROWS OUT TENSOR_PARALLEL ENGINE"""

import json
import os
import sys
from types import SimpleNamespace

from omnitrain.rollout import vllm_compat

vllm_compat.prepare_environment()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from omnitrain.data.schema import RowFile  # noqa: E402
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy  # noqa: E402
from omnitrain.models.qwen3_omni.processing import Processing  # noqa: E402
from omnitrain.models.qwen3_omni.spec import Lora, Qwen3OmniModel  # noqa: E402
from omnitrain.rollout.engine import Request, Sampling  # noqa: E402
from omnitrain.rollout.queue import PromptQueue, engine_group  # noqa: E402
from omnitrain.rollout.trainer import TrainerEngine  # noqa: E402
from omnitrain.rollout.vllm_omni import VllmOmniEngine  # noqa: E402
from omnitrain.train.distributed import init_ranks  # noqa: E402

TEMPERATURE = 0.9


def main(model: str, rows: str, out: str, tensor_parallel: int, kind: str) -> None:
    ranks = init_ranks(tensor_parallel)
    processing = Processing(model, system=None, max_prompt_tokens=512)
    spec = Qwen3OmniModel(family="qwen3_omni", path=model, dtype="float32", lora=Lora(rank=4, alpha=8))
    policy = ThinkerPolicy(spec, mesh=ranks.mesh, device=ranks.device, seed=0, gradient_checkpointing=False)
    place = engine_group(tensor_parallel)
    if kind == "trainer":
        engine = TrainerEngine(policy, max_concurrent=8, eos_ids=processing.eos_ids)
    else:
        engine = VllmOmniEngine(
            model, place=place, dtype="float32", seed=3, max_model_len=640, max_concurrent=8,
            max_batched_tokens=1024, eos_ids=processing.eos_ids, decode=processing.decode,
        )  # fmt: skip
    prompts = [processing.encode(row) for row in (RowFile(rows)[i] for i in range(8))]

    def request(index: int) -> Request:
        return Request(index, prompts[index], 1000 * index)

    def ask(name: str, n: int = 2, count: int = 8, **options):
        queue = PromptQueue(SimpleNamespace(tensor_parallel=tensor_parallel), count, request, name=name, **options)
        return list(engine.generate(queue.pull, Sampling(n, TEMPERATURE, 10)))

    plain = [s.tokens for s in ask("before")]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            local = torch.distributed.tensor.distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.add_(local)
    report = engine.load_weights(policy.stream_weights(full=True), full=True)
    lora = engine.load_weights(policy.stream_weights())
    shared = ask("after")
    static = ask("static", deterministic=True)
    odd = ask("odd", count=1, n=3)  # one engine has nothing to do
    everyone = ranks.gather([(s.group, s.child, s.tokens, s.logprobs, s.prompt_ids) for s in shared])
    # Every rank scores the same samples: the sharded forward is collective.
    gaps = []
    for group, _, tokens, logprobs, _ in sorted(item for share in everyone for item in share):
        with torch.no_grad():
            logp, _ = policy.logprobs([(prompts[group], tokens)], TEMPERATURE)
        gaps.append((logp - torch.tensor(logprobs)).abs().max().item())
    total = torch.ones(1) * (ranks.rank + 1)
    dist.all_reduce(total)
    engine.close()
    still = torch.ones(1)
    dist.all_reduce(still)
    facts = {
        "changed": plain != [s.tokens for s in shared],
        "ignored": sorted(report.ignored | lora.ignored),
        "taken": report.pushed == policy.expected_names(True) and lora.pushed == policy.expected_names(),
        "shared": [(s.group, s.child, s.tokens) for s in shared],
        "static": [(s.group, s.child, s.tokens) for s in static],
        "odd": len(odd),
        "gap": max(gaps),
        "scored": len(gaps),
        "expanded": all(s.prompt_ids == prompts[s.group].ids for s in shared),
        "sum": total.item() + still.item(),
        "multiprocessing": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"],
    }
    gathered = ranks.gather(facts)
    if ranks.main:
        with open(out, "w") as file:
            json.dump(gathered, file)
    dist.destroy_process_group()


main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
