"""A float32 moving average of the trained weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from omnitrain.models.qwen3_omni.weights import exchanged
from omnitrain.recipe.schema import Ema as EmaSettings
from omnitrain.train.checkpoint_state import trainable_state


class Ema:
    """average = decay * average + (1 - decay) * weights, every `every` optimizer updates, from the starting weights on.

    Make it before the first step; call `update` after every optimizer step; validate inside `swapped`. The engine is
    given the averaged weights by a sync inside, and the trained ones by the next sync after it.
    """

    def __init__(self, module: Module, spec: EmaSettings) -> None:
        trainable_state(module)  # after a forward the module's parameters may be the gathered ones
        self._decay, self._every = spec.decay, spec.every
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.updates = 0
        """Optimizer updates seen."""
        self.averages: dict[str, Tensor] = {}
        """By the names of the checkpoint's weights; DTensors where those are."""
        self.restart()

    def restart(self) -> None:
        """Begin again from the weights as they are."""
        self.averages = {name: p.detach().float().clone() for name, p in self._weights.items()}
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Count an optimizer update, and take the weights into the average if it is time."""
        self.updates += 1
        if self.updates % self._every == 0:
            for name, parameter in self._weights.items():
                self.averages[name].lerp_(parameter.detach().float(), 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the module has the averaged weights; afterwards the trained ones, bit for bit."""
        with exchanged((self._weights[name], average) for name, average in self.averages.items()):
            yield
