"""A small FSDP2 module with a frozen part: train it, save it, load it. `sharded.py ACTION DIR`, under torchrun or alone."""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from omnitrain.errors import RunError
from omnitrain.train.checkpoint import Checkpointer, load_trainable


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 7).requires_grad_(False)
        self.body = nn.Linear(7, 5)  # 5 rows: uneven shards on 2 ranks
        self.lora_old = nn.Module()
        self.lora_old.lora_A = nn.Linear(5, 3, bias=False).requires_grad_(False)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.frozen(x))))


def build(seed: int):
    torch.manual_seed(seed)
    net = Net()
    if dist.is_initialized():
        fully_shard(net.body)
        fully_shard(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))


def train(net, optimizer, scheduler, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def snapshot(net, optimizer, scheduler) -> dict:
    for part in net.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    values = {name: full(p.detach()).tolist() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            values[f"{name}/{key}"] = full(value).tolist()
    values["lr"] = [optimizer.param_groups[0]["lr"], scheduler.get_last_lr(), scheduler.last_epoch]
    return values


def draws() -> list:
    return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]


def main(action: str, folder: Path) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpointer = Checkpointer(folder / "checkpoints", keep_last=2)
    net, optimizer, scheduler = build(seed=1 if action == "save" else 99)
    result = {}
    if action == "save":
        train(net, optimizer, scheduler, 3)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + rank)
        checkpointer.save(3, net, optimizer, scheduler, {"sampler": {"position": 7}, "updates": 3})
        before = snapshot(net, optimizer, scheduler)
        trip = checkpointer.round_trip(net, optimizer)
        assert snapshot(net, optimizer, scheduler) == before
        result = {"state": before, "draws": draws(), "unequal": trip.unequal, "tensors": trip.tensors}
        other = build(seed=98)
        load_trainable(folder, other[0])
        result["init"] = snapshot(*other)
        if rank == 1:
            os.fsync = _no_space  # of two ranks' disks one is full
        try:
            checkpointer.save(4, net, optimizer, scheduler, {}) if dist.is_initialized() else None
        except RunError as error:
            result["full_disk"] = str(error)
    elif action == "load":
        train(net, optimizer, scheduler, 1)
        extra = checkpointer.load(checkpointer.latest(), net, optimizer, scheduler)
        result = {"state": snapshot(net, optimizer, scheduler), "draws": draws(), "extra": extra}
    (folder / f"{action}_{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _no_space(descriptor) -> None:
    raise OSError(28, "No space left on device")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
