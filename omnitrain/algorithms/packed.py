"""Sequences of different lengths laid end to end: (N,) token values and (S,) lengths that sum to N.

How token losses become one number, as a sum and the units it is divided by over the whole update:

    token_mean      sum_i sum_t L_it            tokens                  DAPO, SFT
    sequence_mean   sum_i mean_t L_it           sequences               GRPO, GSPO
    fixed_length    sum_i sum_t L_it            sequences * max_tokens  Dr. GRPO (arXiv 2503.20783)
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def check_lengths(lengths: Tensor | Sequence[int], **tensors: Tensor | None) -> list[int]:
    """The lengths as ints. Raises ValueError if one is not positive, or if a named tensor is not (sum(lengths),);
    None is left out."""
    sizes = lengths.tolist() if isinstance(lengths, Tensor) else [int(n) for n in lengths]
    for index, size in enumerate(sizes):
        if size < 1:
            raise ValueError(f"sequence {index} has {size} response tokens; leave empty responses out of the batch")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (sum(sizes),):
            raise ValueError(f"{name} is {tuple(tensor.shape)}, but the lengths sum to {sum(sizes)}")
    return sizes


def sequence_means(values: Tensor, sizes: list[int]) -> Tensor:
    """(N,) -> (S,): the mean over the tokens of each sequence.

    A loop and not index_add: the same sum whatever else is in the batch, and deterministic on every device.
    """
    if not sizes:
        return values.new_zeros(0) + values.sum()
    return torch.stack([part.mean() for part in values.split(sizes)])


def sequence_sums(values: Tensor, sizes: list[int]) -> Tensor:
    """(N,) -> (S,): the sum over the tokens of each sequence, in the same way."""
    if not sizes:
        return values.new_zeros(0) + values.sum()
    return torch.stack([part.sum() for part in values.split(sizes)])


def per_token(values: Tensor, sizes: list[int]) -> Tensor:
    """(S,) -> (N,): each sequence's value repeated for its tokens."""
    return values.repeat_interleave(torch.tensor(sizes, device=values.device, dtype=torch.long))


def kept_tokens(keep: Tensor | None, sizes: list[int], *values: Tensor | None) -> tuple[list[int], Tensor, list]:
    """The batch without its rejected tokens, as if they had not been sampled.

    keep:   (N,) bool, False for a rejected token; None keeps all.
    values: (N,) tensors, or None.

    Returns the lengths that are left (a sequence without a kept token is gone), which of the S sequences those are,
    (S,) bool, and the values of the kept tokens.
    """
    if keep is None:
        return sizes, torch.ones(len(sizes), dtype=torch.bool), list(values)
    counts = sequence_sums(keep.long(), sizes).cpu()
    left = counts > 0
    return counts[left].tolist(), left, [None if value is None else value[keep] for value in values]


def aggregate(values: Tensor, sizes: list[int], aggregation: Aggregation) -> Tensor:
    """(N,) -> scalar: the sum to divide by `count_units` of the whole update. An empty batch gives 0."""
    if aggregation == "sequence_mean":
        return sequence_means(values, sizes).sum()
    return values.sum()


def count_units(sizes: Sequence[int], aggregation: Aggregation, max_tokens: int | None = None) -> int:
    """What sequences of these lengths count in the denominator. max_tokens: the longest response that could have been
    sampled, for fixed_length. Raises ValueError if that is missing, exceeded or not needed."""
    if (max_tokens is not None) != (aggregation == "fixed_length"):
        raise ValueError(f'aggregation "{aggregation}" with max_tokens = {max_tokens}: "fixed_length" alone takes it')
    if aggregation == "token_mean":
        return sum(sizes)
    if aggregation == "sequence_mean":
        return len(sizes)
    if aggregation != "fixed_length":
        raise ValueError(f'unknown aggregation "{aggregation}"')
    if max(sizes, default=0) > max_tokens:
        raise ValueError(f"a response of {max(sizes)} tokens is longer than max_tokens = {max_tokens}")
    return len(sizes) * max_tokens
