"""Ranks that run a sharded policy and save what a single process can be held against.

Usage under torchrun: sharded_policy.py MODEL OUT. Rank 0 has text only, rank 1 pictures, sounds and a video.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.models.qwen3_omni.spec import Lora, Qwen3OmniModel
from omnitrain.models.qwen3_omni.weights import shard_of, whole
from omnitrain.train.distributed import init_ranks
from tests.unit.models.conftest import ANSWERS, ROWS

# Rank 3 leaves the adapters' rows uneven over two ranks.
CASES = {
    "lora": Lora(rank=3, alpha=6),
    "experts": Lora(rank=3, alpha=6, targets="attention+experts"),
    "full": None,
}
SPLIT = 1
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


def make(model: str, lora: Lora | None, mesh=None, dtype: str = "float32", seed: int = 0) -> ThinkerPolicy:
    spec = Qwen3OmniModel(family="qwen3_omni", path=model, dtype=dtype, lora=lora)
    return ThinkerPolicy(spec, mesh=mesh, device=torch.device("cpu"), seed=seed, gradient_checkpointing=True)


@torch.no_grad()
def disturb(policy: ThinkerPolicy, scale: float = 0.05) -> None:
    for i, (_, p) in enumerate(policy.trainable()):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * scale
        p.add_(shard_of(noise, p))


def examine(policy: ThinkerPolicy, batch: list, world: int, save: Path | None = None) -> dict:
    """Everything compared; the reference comes before any forward with gradients, where FSDP could miss the adapter."""
    found = {}
    if policy.lora_count:
        with torch.no_grad(), policy.reference():
            found["reference"] = policy.logprobs(batch)[0]
    disturb(policy)
    logp, _ = policy.logprobs(batch, temperature=0.9)
    found["logprobs"] = logp.detach()
    (logp * torch.linspace(-1, 2, logp.numel())).sum().mul(world).backward()
    found["gradients"] = {name: whole(p.grad) for name, p in policy.trainable()}
    policy.module.zero_grad()
    with torch.no_grad():
        policy.logprobs(batch)
        disturb(policy)  # as an optimizer step would; nothing whole may be left from the forward before
        found["later"] = policy.logprobs(batch)[0]
        found["logits"] = policy.next_logits(batch)
    found["stream"] = dict(policy.stream_weights())
    found["full stream"] = dict(policy.stream_weights(full=True))
    assert set(found["stream"]) == policy.expected_names()
    if save:
        dcp.save({"model": get_model_state_dict(policy.module, options=TRAINED_ONLY)}, checkpoint_id=save)
    # One rank without samples: it must take part, and add nothing.
    logp, _ = (
        policy.logprobs(batch if dist.get_rank() == 0 else [])
        if dist.is_initialized()
        else (policy.logprobs(batch)[0], 0)
    )
    logp.sum().backward()
    found["filler"] = {name: whole(p.grad) for name, p in policy.trainable()}
    return found


def main(model: str, out: str) -> None:
    torch.set_num_threads(1)
    ranks = init_ranks()
    processing = Processing(model, system=None, max_prompt_tokens=512)
    pairs = [(processing.encode(row), answer) for row, answer in zip(ROWS.values(), ANSWERS, strict=True)]
    mine = pairs[:SPLIT] if ranks.main else pairs[SPLIT:]
    results = {}
    for name, lora in CASES.items():
        folder = Path(out).with_name(f"{name}-checkpoint")
        policy = make(model, lora, ranks.mesh)
        results[name] = examine(policy, mine, ranks.world, folder)
        other = make(model, lora, ranks.mesh, seed=1)
        state = {"model": get_model_state_dict(other.module, options=TRAINED_ONLY)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other.module, state["model"], options=TRAINED_ONLY)
        results[name]["restored"] = {
            n: torch.equal(whole(p), whole(q))
            for (n, p), (_, q) in zip(policy.trainable(), other.trainable(), strict=True)
        }
        if lora:
            results[name]["start"] = start(make(model, lora, ranks.mesh), mine)
        results[name]["bfloat16"] = mixed(make(model, lora, ranks.mesh, "bfloat16"), mine)
    torch.save(results, f"{out}.{ranks.rank}")
    ranks.barrier()


def start(policy: ThinkerPolicy, batch: list) -> dict:
    """A policy that starts from an adapter, before and after its weights move: log-probs, and the reference's."""
    tensors = {}
    for i, (name, p) in enumerate(policy.trainable()):
        tensors[name] = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1
    policy.start_from(tensors)
    with torch.no_grad():
        found = {"first": policy.logprobs(batch)[0]}
    disturb(policy)
    trained = {name: whole(p).clone() for name, p in policy.trainable()}
    logp, _ = policy.logprobs(batch)
    with torch.no_grad(), policy.reference():
        found["reference"] = policy.logprobs(batch)[0]
    logp.sum().backward()
    found["trained"] = logp.detach()
    found["kept"] = all(torch.equal(whole(p), trained[name]) for name, p in policy.trainable())
    found["gradients"] = all(whole(p.grad).norm() > 0 for _, p in policy.trainable())
    return found


def mixed(policy: ThinkerPolicy, batch: list) -> dict:
    disturb(policy)
    logp, entropy = policy.logprobs(batch, entropy=True)
    logp.sum().backward()
    return {
        "logprobs": logp.detach(),
        "dtypes": {str(p.dtype) for _, p in policy.trainable()} | {str(p.grad.dtype) for _, p in policy.trainable()},
        "answers": {str(logp.dtype), str(entropy.dtype)},
        "nonzero": all(whole(p.grad).norm() > 0 for name, p in policy.trainable() if "lora" in name),
        "stream": {str(t.dtype) for _, t in policy.stream_weights(full=True)},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
