"""The rollout engine's protocol and its states.

An engine is ASLEEP (may not generate, KV cache released), has WEIGHTS (may be synced), or is
AWAKE (may generate). A call that a state does not allow is an EngineStateError before anything
reaches the device. Weights that were dropped are tracked: generating before a full refill is
an error, not gibberish.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Callable, Iterable, Iterator, Protocol

from omnitrain.data.sample import Prompt, Sample
from omnitrain.errors import EngineStateError

if TYPE_CHECKING:
    import torch


class State(Enum):
    ASLEEP = "asleep"
    WEIGHTS = "weights"
    AWAKE = "awake"


@dataclass(frozen=True)
class Sampling:
    """How to sample. Training rollouts use temperature alone."""

    n: int
    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Request:
    """One prompt to answer n times. `seed` is hash(run seed, step, row id), never the rank's."""

    group: int
    prompt: Prompt
    seed: int


@dataclass
class SyncReport:
    """What a weight sync did."""

    pushed: set[str] = field(default_factory=set)
    """Engine parameter names (as streamed) that were loaded."""
    ignored: set[str] = field(default_factory=set)
    """Streamed names the engine did not take: always a bug, gate G3 stops on it."""
    bytes: int = 0
    seconds: float = 0.0


class RolloutEngine(Protocol):
    """One engine of one rank (or of one tensor-parallel group of ranks)."""

    name: str
    state: State
    weights_valid: bool

    def generate(self, pull: Callable[[], Request | None], sampling: Sampling) -> Iterator[Sample]:
        """Ask `pull` for requests until it returns None, and yield each sample as it finishes. Needs AWAKE."""

    def load_weights(self, named: Iterable[tuple[str, "torch.Tensor"]], *, full: bool = False) -> SyncReport:
        """Take weights by engine name. Needs WEIGHTS or AWAKE. `full` says that every parameter is among them."""

    def wake(self, state: State = State.AWAKE) -> None:
        """ASLEEP -> WEIGHTS -> AWAKE. Waking to the state it is in is an error."""

    def sleep(self) -> None:
        """AWAKE or WEIGHTS -> ASLEEP, giving back what `rollout.sleep` says."""

    def delta_norm(self) -> float:
        """Norm of what syncs have changed since the start on a watched layer, as the engine itself has it. Not ASLEEP."""

    def close(self) -> None: ...


class StateMachine:
    """The states shared by all engines; an engine subclasses it and does its work in the hooks."""

    name = "engine"

    def __init__(self) -> None:
        self.state = State.AWAKE
        self.weights_valid = True

    def require(self, call: str, *states: State) -> None:
        """Raise EngineStateError unless the engine is in one of `states`."""
        if self.state not in states:
            allowed = " or ".join(s.name for s in states)
            raise EngineStateError(f"{self.name}: {call} while {self.state.name}; it needs {allowed}")

    def require_generate(self) -> None:
        """Raise EngineStateError unless the engine is awake and its weights are real."""
        self.require("generate", State.AWAKE)
        if not self.weights_valid:
            raise EngineStateError(
                f"{self.name}: generate after the weights were dropped and before a full load_weights(full=True)"
            )
