"""What a checkpoint is made of: trained weights and optimizer tensors by full parameter names, and the random states."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer


def trainable_state(module: Module) -> dict[str, Tensor]:
    """What training changes: parameters that need gradients, and all adapters, also frozen ones (a reference, an "old")."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after a forward its parameters may still be the gathered ones
    return {
        clean(name): parameter.detach()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad or ".lora_" in name
    }


def optimizer_state(module: Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter name; empty before the first update, and left so.

    (DCP's own helper makes a first, zero step to fill an empty optimizer, which would shift AdamW's bias correction.)
    """
    trainable_state(module)
    names = {parameter: clean(name) for name, parameter in module.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in values.items() if isinstance(value, Tensor)}
        for parameter, values in optimizer.state.items()
    }


def clean(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def tensors(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
    """The leaves of nested dicts, named by their path."""
    found = []
    for key, value in tree.items():
        found += tensors(value, f"{prefix}{key}/") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def map_tensors(tree: dict[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same nested dicts with each tensor replaced."""
    return {k: map_tensors(v, function) if isinstance(v, dict) else function(v) for k, v in tree.items()}


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensor: Tensor) -> Tensor:
    """This rank's shard as bytes, for comparisons that tell -0 from 0 and one NaN from another."""
    return local(tensor).contiguous().reshape(-1).view(torch.uint8)


def local_bytes(tree: dict[str, Any]) -> int:
    """Bytes of this rank's shards."""
    return sum(local(tensor).nbytes for _, tensor in tensors(tree))


def device_of(state: dict[str, Tensor]) -> torch.device:
    """The device of the trained weights."""
    return next(iter(state.values())).device


def rng_state(device: torch.device) -> dict[str, Any]:
    """This rank's random states, as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `rng_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
