"""Which rows a step takes: endless streams of permutations that can be put down and taken up at any row.

A stream gives rows one after the other (`take`), says which rows it can give (`pool`), and turns into plain JSON types
and back (`state_dict`, `load_state_dict`). Streams are put together: `Mixture` draws from several by weight,
`ByModality` from one of several per step. The draw knows nothing of ranks, so their number never changes it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from omnitrain.errors import DataError


class Stream(Protocol):
    """What a step draws its rows from."""

    consumed: int
    """Rows drawn so far."""
    pool: Sequence[int]
    """The rows that the step under way is drawn from."""

    def begin(self) -> None:
        """A new step's draw begins."""

    def take(self, count: int) -> list[int]:
        """The next `count` rows; a step that skips rows takes their replacements so."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, in plain JSON types."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. DataError if it belongs to other rows or to another seed."""


class PromptSampler:
    """A stream over the rows 0 .. n_rows - 1, or over the rows of a list.

    Every epoch is one permutation, fixed by (seed, name, epoch); a step may take the end of one and the
    beginning of the next, so no step is ever short. One draw of at most `n_rows` never holds a row
    twice: rows that it took from the end of an epoch come last in the next.
    """

    def __init__(
        self, rows: int | Sequence[int], per_step: int, seed: int, shuffle: bool = True, *, name: str = ""
    ) -> None:
        self.pool = range(rows) if isinstance(rows, int) else rows
        self.n_rows = len(self.pool)
        if self.n_rows < 1:
            raise DataError("the training file holds no rows; prepare it again")
        if per_step < 1:
            raise ValueError(f"per_step = {per_step}: a step needs at least one row")
        self.per_step, self.seed, self.shuffle, self.name = per_step, seed, shuffle, name
        self._epoch, self._offset, self._deferred = 0, 0, []
        self._order = self._permutation()

    @property
    def consumed(self) -> int:
        """Rows drawn so far."""
        return self._epoch * self.n_rows + self._offset

    @property
    def epoch(self) -> int:
        """Whole passes over the rows so far."""
        return self.consumed // self.n_rows

    def begin(self) -> None:
        """A new step's draw begins; nothing hangs on it here."""

    def next(self) -> list[int]:
        """The rows of the next step."""
        return self.take(self.per_step)

    def take(self, count: int) -> list[int]:
        """The next `count` rows; a step that skips rows takes their replacements so."""
        step: list[int] = []
        while len(step) < count:
            if self._offset == self.n_rows:
                self._epoch, self._offset = self._epoch + 1, 0
                self._deferred = sorted(set(step))
                self._order = self._permutation()
            taken = self._order[self._offset : self._offset + count - len(step)]
            self._offset += len(taken)
            step += taken
        return step

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, in plain JSON types."""
        return {
            "n_rows": self.n_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "offset": self._offset,
            "deferred": list(self._deferred),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. DataError if it belongs to other rows or to another seed."""
        _check_state(state, {name: getattr(self, name) for name in ("n_rows", "seed", "shuffle")})
        self._epoch, self._offset, self._deferred = state["epoch"], state["offset"], list(state["deferred"])
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(self.pool)
        if not self.shuffle:
            return order
        # A string seed goes through SHA-512, so neighbouring seeds and epochs share nothing.
        part = f"{self.name}/" if self.name else ""
        random.Random(f"rows/{self.seed}/{part}{self._epoch}").shuffle(order)
        late = set(self._deferred)
        return [row for row in order if row not in late] + [row for row in order if row in late]


class Mixture:
    """Several streams, each with its share of the draws.

    Every draw goes to the stream that is furthest behind its share, so that no prefix of the draws is off by more than
    the number of streams.
    """

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float], per_step: int) -> None:
        if len(streams) != len(weights) or min(weights) <= 0:
            raise ValueError(f"weights {list(weights)} for {len(streams)} streams; one above 0 for each is needed")
        self.streams, self.weights, self.per_step = list(streams), [float(weight) for weight in weights], per_step
        self._shares = [weight / sum(self.weights) for weight in self.weights]
        self._drawn = [0] * len(streams)
        self.pool = [row for stream in self.streams for row in stream.pool]

    @property
    def consumed(self) -> int:
        """Rows drawn so far."""
        return sum(self._drawn)

    @property
    def epoch(self) -> int:
        """How often as many rows as there are have been drawn; a file of large weight was seen more often."""
        return self.consumed // len(self.pool)

    def begin(self) -> None:
        """A new step's draw begins; nothing hangs on it here."""

    def next(self) -> list[int]:
        """The rows of the next step."""
        return self.take(self.per_step)

    def take(self, count: int) -> list[int]:
        """The next `count` rows."""
        turns = []
        for _ in range(count):
            due = self.consumed + 1
            behind = [share * due - drawn for share, drawn in zip(self._shares, self._drawn)]
            turns.append(behind.index(max(behind)))
            self._drawn[turns[-1]] += 1
        # Each stream is asked once: so it keeps a row from standing in the step twice.
        taken = [iter(stream.take(turns.count(number))) for number, stream in enumerate(self.streams)]
        return [next(taken[number]) for number in turns]

    def state_dict(self) -> dict[str, Any]:
        """Where the streams stand, in plain JSON types."""
        streams = [stream.state_dict() for stream in self.streams]
        return {"weights": list(self.weights), "drawn": list(self._drawn), "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. DataError if it belongs to other rows, weights or another seed."""
        _check_state(state, {"weights": self.weights})
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self._drawn = list(state["drawn"])


class ByModality:
    """Every step's rows are of one modality: drawn anew for each step, by weight, from (seed, step)."""

    def __init__(self, streams: dict[str, Stream], weights: dict[str, float], per_step: int, seed: int) -> None:
        self.streams = {name: streams[name] for name in sorted(streams)}
        self.weights = {name: float(weights[name]) for name in self.streams}
        self.per_step, self.seed = per_step, seed
        self._begun = 0
        self._rows = sum(len(stream.pool) for stream in self.streams.values())

    @property
    def modality(self) -> str:
        """The modality of the step under way; before the first, the first's."""
        chosen = random.Random(f"modality/{self.seed}/{max(self._begun, 1)}")
        return chosen.choices(list(self.weights), list(self.weights.values()))[0]

    @property
    def pool(self) -> Sequence[int]:
        """The rows that the step under way is drawn from."""
        return self.streams[self.modality].pool

    @property
    def consumed(self) -> int:
        """Rows drawn so far."""
        return sum(stream.consumed for stream in self.streams.values())

    @property
    def epoch(self) -> int:
        """How often as many rows as there are have been drawn; a modality of few rows was seen more often."""
        return self.consumed // self._rows

    def begin(self) -> None:
        """Choose the next step's modality."""
        self._begun += 1

    def next(self) -> list[int]:
        """The rows of the next step."""
        self.begin()
        return self.take(self.per_step)

    def take(self, count: int) -> list[int]:
        """The next `count` rows of the modality of the step under way."""
        return self.streams[self.modality].take(count)

    def state_dict(self) -> dict[str, Any]:
        """Where the streams stand, in plain JSON types."""
        streams = {name: stream.state_dict() for name, stream in self.streams.items()}
        return {"modalities": dict(self.weights), "seed": self.seed, "begun": self._begun, "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. DataError if it belongs to other rows, weights or another seed."""
        _check_state(state, {"modalities": self.weights, "seed": self.seed})
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        self._begun = state["begun"]


Sampler = PromptSampler | Mixture | ByModality


def build_sampler(
    files: Sequence[Sequence[int]],
    *,
    per_step: int,
    seed: int,
    shuffle: bool = True,
    weights: Sequence[float] | None = None,
    modalities: Sequence[str] | None = None,
    modality_weights: dict[str, float] | None = None,
) -> Sampler:
    """The sampler of a run.

    files: the rows of each file, as indices in the whole.
    weights: each file's share of the draws. Without it every row is as likely as any other.
    modalities: of every row of the whole. With it each step is of one modality.
    modality_weights: how often each comes, and which come at all; without it all do, equally often.

    Raises DataError for a modality without rows, or with fewer than a step takes.
    """
    if modalities is None:
        return _stream(files, weights, per_step, seed, shuffle)
    present = {modalities[row] for rows in files for row in rows}
    wanted = modality_weights or dict.fromkeys(present, 1.0)
    if absent := sorted(set(wanted) - present):
        raise DataError(
            f"data.modality_weights names {absent[0]}, which no training row is of; "
            f"there are {', '.join(sorted(present))}"
        )
    streams = {}
    for modality in sorted(wanted):
        parts = [[row for row in rows if modalities[row] == modality] for rows in files]
        if (count := sum(map(len, parts))) < per_step:
            raise DataError(
                f'data.batches = "modality": {modality} has {count} training rows, fewer than train.prompts_per_step = '
                f"{per_step}; prepare more of them, lower train.prompts_per_step, or name only the other modalities in "
                "data.modality_weights"
            )
        streams[modality] = _stream(parts, weights, per_step, seed, shuffle, modality)
    return ByModality(streams, wanted, per_step, seed)


def _stream(files, weights, per_step: int, seed: int, shuffle: bool, name: str = "") -> PromptSampler | Mixture:
    if weights is None or len(files) == 1:
        rows = [row for part in files for row in part]
        return PromptSampler(rows, per_step, seed, shuffle, name=name)
    held = [(number, rows, weight) for number, (rows, weight) in enumerate(zip(files, weights)) if rows]
    streams = [
        PromptSampler(rows, per_step, seed, shuffle, name=f"{name}/{number}".strip("/")) for number, rows, _ in held
    ]
    return Mixture(streams, [weight for _, _, weight in held], per_step)


def _check_state(state: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        if state.get(name) != value:
            raise DataError(
                f"the checkpoint's sampler has {name} = {state.get(name)}, this run {name} = {value}: "
                "the rows would repeat or be skipped; use the same data and seed, or start a new run"
            )


def steps_in(n_rows: int, per_step: int, epochs: int) -> int:
    """Whole steps in `epochs` passes over the file, at least one."""
    return max(1, n_rows * epochs // per_step)
