"""Sequences of different lengths laid end to end: (N,) token values and (S,) lengths that sum to N."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_lengths(lengths: Tensor | Sequence[int], **tensors: Tensor) -> list[int]:
    """The lengths as ints. Raises ValueError if one is not positive, or if a named tensor is not (sum(lengths),)."""
    sizes = [int(n) for n in lengths]
    for index, size in enumerate(sizes):
        if size < 1:
            raise ValueError(f"sequence {index} has {size} response tokens; leave empty responses out of the batch")
    for name, tensor in tensors.items():
        if tensor.shape != (sum(sizes),):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, but the lengths sum to {sum(sizes)}")
    return sizes


def sequence_means(values: Tensor, sizes: list[int]) -> Tensor:
    """(N,) -> (S,): the mean over the tokens of each sequence.

    A loop and not index_add: the same sum whatever else is in the batch, and deterministic on every device.
    """
    if not sizes:
        return values.new_zeros(0) + values.sum()
    return torch.stack([part.mean() for part in values.split(sizes)])


def per_token(values: Tensor, sizes: list[int]) -> Tensor:
    """(S,) -> (N,): each sequence's value repeated for its tokens."""
    return values.repeat_interleave(torch.tensor(sizes, device=values.device, dtype=torch.long))
