"""The ranks of a run and the few collectives the loops use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omnitrain import device as devices
from omnitrain.errors import UsageError


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. Every rank trains; `tensor_parallel` neighbours share one engine."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    tensor_parallel: int = 1

    @property
    def main(self) -> bool:
        """Global rank 0: the only one that writes the run directory."""
        return self.rank == 0

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.gather(flag))

    def barrier(self) -> None:
        dist.barrier()


def init_ranks(tensor_parallel: int = 1) -> Ranks:
    """Join the process group that torchrun describes.

    Raises:
        UsageError: `tensor_parallel` does not divide the number of ranks.
    """
    device = devices.current_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        # Objects travel by gloo whatever the device; a slow reward or a long checkpoint must not look like a hang.
        dist.init_process_group(devices.backend(device), timeout=timedelta(hours=2))
    world = dist.get_world_size()
    if world % tensor_parallel:
        raise UsageError(
            f"rollout.tensor_parallel = {tensor_parallel} does not divide the {world} ranks; "
            f"start a multiple of {tensor_parallel} ranks or change rollout.tensor_parallel"
        )
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return Ranks(dist.get_rank(), world, device, mesh, tensor_parallel)
