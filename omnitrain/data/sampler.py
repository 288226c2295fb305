"""Which rows a step takes: an endless stream of permutations that can be put down and taken up at any row."""

from __future__ import annotations

import random
from typing import Any

from omnitrain.errors import DataError


class PromptSampler:
    """Draws `per_step` row indices at a time from the rows 0 .. n_rows - 1.

    Every epoch is one permutation, fixed by (seed, epoch); a step may take the end of one and the
    beginning of the next, so no step is ever short. One draw of at most `n_rows` never holds a row
    twice: rows that it took from the end of an epoch come last in the next.
    The draw knows nothing of ranks, so the number of devices never changes it.
    """

    def __init__(self, n_rows: int, per_step: int, seed: int, shuffle: bool = True) -> None:
        if n_rows < 1:
            raise DataError("the training file holds no rows; prepare it again")
        if per_step < 1:
            raise ValueError(f"per_step = {per_step}: a step needs at least one row")
        self.n_rows, self.per_step, self.seed, self.shuffle = n_rows, per_step, seed, shuffle
        self._epoch, self._offset, self._deferred = 0, 0, []
        self._order = self._permutation()

    @property
    def consumed(self) -> int:
        """Rows drawn so far."""
        return self._epoch * self.n_rows + self._offset

    @property
    def epoch(self) -> int:
        """Whole passes over the file so far."""
        return self.consumed // self.n_rows

    def next(self) -> list[int]:
        """The row indices of the next step."""
        return self.take(self.per_step)

    def take(self, count: int) -> list[int]:
        """The next `count` row indices; a step that skips rows takes their replacements so."""
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
        for name in ("n_rows", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"the checkpoint's sampler has {name} = {state[name]}, this run {name} = {getattr(self, name)}: "
                    "the rows would repeat or be skipped; use the same data and seed, or start a new run"
                )
        self._epoch, self._offset, self._deferred = state["epoch"], state["offset"], list(state["deferred"])
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(self.n_rows))
        if not self.shuffle:
            return order
        # A string seed goes through SHA-512, so neighbouring seeds and epochs share nothing.
        random.Random(f"rows/{self.seed}/{self._epoch}").shuffle(order)
        late = set(self._deferred)
        return [row for row in order if row not in late] + [row for row in order if row in late]


def steps_in(n_rows: int, per_step: int, epochs: int) -> int:
    """Whole steps in `epochs` passes over the file, at least one."""
    return max(1, n_rows * epochs // per_step)
