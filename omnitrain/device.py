"""What the accelerator is and can do. The only module that may name a vendor's API.

Everything else takes a `torch.device` and asks here, so that another accelerator (Ascend's "npu")
is a name in these functions and not a fork of the code.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

# torch.distributed's backend by device type; the CPU's group carries control messages everywhere.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl", "xpu": "cpu:gloo,xpu:xccl"}


def available() -> bool:
    """Whether there is an accelerator."""
    return torch.accelerator.is_available()


def count() -> int:
    """Visible accelerators."""
    return torch.accelerator.device_count() if available() else 0


def current_device(local_rank: int = 0) -> torch.device:
    """The device of this process; makes it the current one."""
    if not available():
        return torch.device("cpu")
    # Convolutions would compute float32 in TF32 by default: image features off by 1e-3.
    torch.backends.cudnn.allow_tf32 = False
    torch.accelerator.set_device_index(local_rank % count())
    return torch.device(torch.accelerator.current_accelerator().type, local_rank % count())


def backend(device: torch.device) -> str:
    """Name for torch.distributed.init_process_group, with gloo for CPU tensors beside the device's own."""
    return _BACKENDS.get(device.type, "gloo")


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_all(seed: int) -> None:
    """Seed torch on the CPU and on every accelerator."""
    torch.manual_seed(seed)


def empty_cache(device: torch.device) -> None:
    """Give freed blocks back to the device, so that the engine in this process can have them."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def experts_implementation(device: torch.device) -> str:
    """transformers' way to run fused experts.

    On an accelerator grouped matrix products are 6 times as fast as the loop ("eager"); on a CPU the loop is
    3 times as fast, with the same values.
    """
    return "eager" if device.type == "cpu" else "grouped_mm"


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: the device's, or this process's resident memory on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.get_device_module(device).max_memory_allocated(device) / 2**30


@contextmanager
def forked_rng(device: torch.device) -> Iterator[None]:
    """Random draws inside leave Python's, NumPy's and torch's generators as they were."""
    python, numpy_state = random.getstate(), numpy.random.get_state()
    devices = [] if device.type == "cpu" else [device.index]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpy_state)
