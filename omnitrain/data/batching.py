"""Token-balanced micro-batches across ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from omnitrain.errors import RunError


def balanced(
    lengths: list[int], max_tokens: int, ranks: int, name: Callable[[int], str] = "sample {}".format
) -> list[list[list[int]]]:
    """Pack items into micro-batches of at most `max_tokens`, the same number of them on every rank.

    Returns, per rank, a list of micro-batches; a micro-batch is a sorted list of indices into
    `lengths`, and may be empty. Every index stands in exactly one. Equal counts matter because each
    micro-batch is a collective forward and backward: a rank with one fewer would leave the others
    waiting. The m-th micro-batches of all ranks have similar sizes for the same reason, largest first,
    so that memory runs out at once or not at all.

    Longest items first into the emptiest bin; bins are added, one per rank, until all fit. The same
    lengths give the same batches.

    Raises RunError when a single item is longer than `max_tokens`, calling it `name(index)`.
    """
    if max_tokens < 1 or ranks < 1:
        raise ValueError(f"max_tokens = {max_tokens}, ranks = {ranks}: both must be at least 1")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"item {index} has {length} tokens")
        if length > max_tokens:
            raise RunError(
                f"{name(index)} has {length} tokens (prompt and response), more than train.max_tokens_per_device = "
                f"{max_tokens}; set train.max_tokens_per_device to {length} or more, or lower data.max_prompt_tokens "
                "(and with a rollout its max_new_tokens)"
            )
    if not lengths:
        return [[] for _ in range(ranks)]
    per_rank = -(-sum(lengths) // (max_tokens * ranks))
    while (bins := _longest_first(lengths, per_rank * ranks, max_tokens)) is None:
        per_rank += 1
    return _deal(bins, lengths, ranks)


def _longest_first(lengths: list[int], n_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Fill `n_bins` bins evenly, or None when one would exceed `max_tokens`."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    emptiest = [(0, number) for number in range(n_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = emptiest[0]
        if load + lengths[index] > max_tokens:
            return None
        heapq.heapreplace(emptiest, (load + lengths[index], number))
        bins[number].append(index)
    return [sorted(members) for members in bins]


def _deal(bins: list[list[int]], lengths: list[int], ranks: int) -> list[list[list[int]]]:
    """Deal the bins out in rounds, one per rank: the largest of a round to the rank with the fewest tokens so far."""
    loads = [sum(lengths[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], bins[b]))
    batches: list[list[list[int]]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        by_total = sorted(range(ranks), key=lambda r: (totals[r], r))
        for rank, number in zip(by_total, order[start : start + ranks], strict=True):
            batches[rank].append(bins[number])
            totals[rank] += loads[number]
    return batches
