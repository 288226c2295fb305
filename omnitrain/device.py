"""What the accelerator is and can do. The only module that may name a vendor's API.

Everything else takes a `torch.device` and asks here, so that another accelerator (Ascend's "npu")
is a name in these functions and not a fork of the code.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

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


def set_deterministic() -> None:
    """Only kernels that give the same bits for the same inputs; one that has no such form is an error.

    The environment's part (cuBLAS reads its workspace before the first product) is launch.environment's.
    """
    torch.use_deterministic_algorithms(True)
    # Uninitialised memory is never read: filling it would write the engine's whole KV cache once more.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


@contextmanager
def engine_kernels() -> Iterator[None]:
    """Around the engine's work: where a kernel has no deterministic form it warns instead of raising.

    Its own kernels do not ask torch; what it takes from torch beside them (a cumulative sum where top_p samples) is
    not for us to replace.
    """
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if not strict:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def named_range(name: str, device: torch.device) -> AbstractContextManager:
    """A range that the vendor's tracer shows (NVTX, for Nsight Systems); nothing where there is none."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()


def can_record_memory(device: torch.device) -> bool:
    """Whether the device's allocator can write down who allocated what."""
    return device.type == "cuda"


def record_memory(device: torch.device) -> None:
    """Begin to write down allocations and frees, with their stacks."""
    if can_record_memory(device):
        torch.cuda.memory._record_memory_history(max_entries=200_000, device=device)


def write_memory(device: torch.device, path: Path) -> None:
    """Write what `record_memory` gathered (a pickle that torch's memory visualiser shows) and end it."""
    if can_record_memory(device):
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


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
