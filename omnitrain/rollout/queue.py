"""Which prompt goes to which engine.

Throughput runs pull the next prompt from an atomic counter that all ranks share, so an engine with long
responses takes fewer prompts and no rank schedules the others. Deterministic runs assign by index. The ranks
of a tensor-parallel engine must see the same prompts: its first rank pulls and the others hear of it by a
broadcast, at the same engine step, because all of them decide from equal state when to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    import torch.distributed as dist

    from omnitrain.rollout.engine import Request


@dataclass(frozen=True)
class EngineGroup:
    """This rank's place among the engines."""

    engine: int = 0
    """Index of this rank's engine."""
    engines: int = 1
    """Number of engines: ranks / tensor_parallel."""
    tp_rank: int = 0
    """This rank's place inside its engine; 0 contributes the samples."""
    tp_size: int = 1
    group: "dist.ProcessGroup | None" = None
    """CPU process group of the engine's ranks; None when there is one."""
    source: int = 0
    """Global rank of the engine's first rank."""


def engine_group(tensor_parallel: int = 1) -> EngineGroup:
    """Make the CPU process groups of all engines; collective over all ranks, neighbours share an engine."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return EngineGroup()
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % tensor_parallel:
        raise ValueError(f"rollout.tensor_parallel = {tensor_parallel} does not divide {world} ranks")
    mine = None
    if tensor_parallel > 1:
        for first in range(0, world, tensor_parallel):
            group = dist.new_group(list(range(first, first + tensor_parallel)), backend="gloo")
            mine = group if first <= rank < first + tensor_parallel else mine
    engine, tp_rank = divmod(rank, tensor_parallel)
    return EngineGroup(engine, world // tensor_parallel, tp_rank, tensor_parallel, mine, engine * tensor_parallel)


class SharedCounter:
    """0, 1, 2, ...: every number is given to exactly one caller among all ranks that use the same key."""

    def __init__(self, key: str, store: "dist.Store | None" = None) -> None:
        """`key` must be new for each use, such as "rollout/12". Without a store and a process group, counts locally."""
        if store is None:
            import torch.distributed as dist

            if dist.is_initialized() and dist.get_world_size() > 1:
                store = dist.distributed_c10d._get_default_store()
        self._key, self._store, self._local = f"omnitrain/{key}", store, -1

    def next(self) -> int:
        if self._store is None:
            self._local += 1
            return self._local
        return self._store.add(self._key, 1) - 1


class Pull:
    """Asked by an engine for its next request; answers None when there is none left.

    `limit` is the most requests one engine should hold at once: an even share, so that the first rank to ask
    does not take what the others were about to.
    """

    def __init__(self, count: int, build: Callable[[int], "Request"], place: EngineGroup, next_index: Callable[[], int]) -> None:
        self.limit = max(1, -(-count // place.engines))
        self._count, self._build, self._place, self._next = count, build, place, next_index
        self._done = False

    def __call__(self) -> "Request | None":
        index = self._count if self._done else self._shared_index()
        if index >= self._count:
            self._done = True
            return None
        return self._build(index)

    def _shared_index(self) -> int:
        place = self._place
        if place.group is None:
            return self._next()
        import torch
        import torch.distributed as dist

        index = torch.tensor([self._next() if place.tp_rank == 0 else 0])
        dist.broadcast(index, src=place.source, group=place.group)
        return int(index)


def make_pull(
    count: int, build: Callable[[int], "Request"], place: EngineGroup, *, key: str, deterministic: bool = False
) -> Pull:
    """Pull requests 0..count-1, made by `build(index)` on the rank that answers them (and its engine's peers).

    deterministic: engine e answers e, e + engines, ... in that order. Otherwise from the counter named `key`,
    which must be the same on all ranks and new for each rollout.
    """
    if deterministic:
        indices = iter(range(place.engine, count, place.engines))
        return Pull(count, build, EngineGroup(place.engine, place.engines), lambda: next(indices, count))
    return Pull(count, build, place, SharedCounter(key).next)
