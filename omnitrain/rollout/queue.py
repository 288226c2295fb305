"""Which prompt goes to which engine.

Throughput runs pull the next prompt from an atomic counter that all ranks share, so an engine with long
responses takes fewer prompts and no rank schedules the others. Deterministic runs assign by index. The ranks
of a tensor-parallel engine must see the same prompts: its first rank pulls and the others hear of it by a
broadcast, at the same engine step, because all of them decide from equal state when to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

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


_GROUPS: dict[tuple[Any, int], EngineGroup] = {}


def engine_group(tensor_parallel: int = 1) -> EngineGroup:
    """This rank's place, neighbours sharing an engine. The first call makes process groups: collective over all ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return EngineGroup()
    key = (dist.group.WORLD, tensor_parallel)
    if key not in _GROUPS:
        _GROUPS[key] = _make_group(tensor_parallel)
    return _GROUPS[key]


def _make_group(tensor_parallel: int) -> EngineGroup:
    import torch.distributed as dist

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
        """`key` must be new for each use. Without a store, that of the default process group; without one, counts locally."""
        if store is None:
            import torch.distributed as dist

            if dist.is_initialized() and dist.get_world_size() > 1:
                store = dist.distributed_c10d._get_default_store()
        self._key, self._store, self._local = f"omnitrain/{key}", store, -1

    def next(self) -> int:
        """The next number that nobody has had."""
        if self._store is None:
            self._local += 1
            return self._local
        return self._store.add(self._key, 1) - 1


class PromptQueue:
    """Hands the prompts 0..count-1 of one rollout to this rank's engine, one at a time.

    Args:
        ranks: has `tensor_parallel`; an EngineGroup will do as well.
        build: makes the request of an index, on the ranks that answer it only.
        deterministic: engine e answers e, e + engines, ... in that order; else whoever asks first.
        name: the same on all ranks and new for each rollout.
        stop: once it is true on an engine's first rank, no further prompt is begun.

    `limit` is the most prompts one engine should hold at once: an even share, so that the first rank to ask
    does not take what the others were about to.
    """

    def __init__(
        self,
        ranks: Any,
        count: int,
        build: "Callable[[int], Request]",
        *,
        deterministic: bool = False,
        name: str = "prompts",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._place = place = ranks if isinstance(ranks, EngineGroup) else engine_group(ranks.tensor_parallel)
        self._count, self._build, self._stop = count, build, stop
        self.limit = max(1, -(-count // place.engines))
        own = iter(range(place.engine, count, place.engines))
        self._next = (lambda: next(own, count)) if deterministic else SharedCounter(name).next
        self._done = False

    @property
    def pull(self) -> "PromptQueue":
        """What an engine is given: call it for the next request, None when there is none left."""
        return self

    def __call__(self) -> "Request | None":
        index = self._count if self._done else self._agreed_index()
        self._done = index >= self._count
        return None if self._done else self._build(index)

    def _agreed_index(self) -> int:
        place = self._place
        index = self._count
        if place.tp_rank == 0 and not self._stop():
            index = self._next()
        if place.group is None:
            return index
        import torch
        import torch.distributed as dist

        box = torch.tensor([index])
        dist.broadcast(box, src=place.source, group=place.group)
        return int(box)
