"""Scores responses while others are still being generated: every reward of every sample is a task of its own.

A failure (an exception, a crash, a late answer, anything but one finite number) never becomes a 0. What it
becomes is the reward's `on_failure`: "fail" stops the run, "skip" leaves the sample out of everything, and
"value:x" puts x in its place; all are counted.
"""

import math
import os
import pickle
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrain.errors import RewardError, RewardTimeout, RunError
from omnitrain.rewards import reward_names
from omnitrain.rewards.pool import Outcome, Pool

if TYPE_CHECKING:
    from omnitrain.recipe.schema import Reward

MAX_SKIPPED = 0.05
"""Largest share of a step's samples that `on_failure = "skip"` may leave out."""


@dataclass
class Scored:
    """One sample's rewards."""

    values: dict[str, float] = field(default_factory=dict)
    """By reward name, unweighted. A failed one is absent, or holds x under "value:x"."""
    failed: dict[str, str] = field(default_factory=dict)
    """By reward name, why it failed: one line."""
    reward: float = math.nan
    """Weighted sum; NaN if the sample is skipped."""
    skipped: bool = False
    """A reward failed under "skip": the sample belongs in no statistic and no update."""


@dataclass
class _Job:
    sample: str
    outcomes: list[Outcome | None]


class Scorer:
    """Runs the rewards of a recipe on `workers` processes of its own. Close it, or use it in a `with`.

    Start it before the accelerator is touched. `log` is a file that receives what the rewards print; without it
    that is dropped. With `wait=False` the start is not waited for, and a reward that cannot be loaded is raised
    by the first `collect` or `canary`. Raises UsageError naming the recipe's field for such a reward.
    """

    def __init__(self, specs: Sequence["Reward"], workers: int = 2, *, log: Path | None = None, wait: bool = True):
        self.names = reward_names(specs)
        self._specs = list(specs)
        self._jobs: dict[int, _Job] = {}
        self._generation = 0
        self._open = 0
        self._failures: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        self._stats: dict[str, dict[str, Any]] = {}
        self._pool = Pool([(spec.kind, getattr(spec, "function", None)) for spec in specs], workers, self._done, log)
        if wait:
            try:
                self._pool.wait_ready()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes at once, whatever they are doing."""
        self._pool.close()

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return self._pool.pids

    def submit(self, key: int, response: str, row: dict) -> None:
        """Start scoring a response; returns at once. `row` holds id, answer, source and meta, all picklable.

        Raises ValueError for a key that is waiting to be collected.
        """
        if key in self._jobs:
            raise ValueError(f"sample {key} was submitted twice")
        messages = [pickle.dumps((index, response, row)) for index in range(len(self._specs))]
        with self._changed:
            self._jobs[key] = _Job(str(row["id"]), [None] * len(messages))
            self._open += len(messages)
        for index, (message, spec) in enumerate(zip(messages, self._specs, strict=True)):
            self._pool.put((self._generation, key, index), message, spec.timeout)

    def collect(
        self, progress: Callable[[int, int], None] | None = None, *, max_skipped: float | None = MAX_SKIPPED
    ) -> dict[int, Scored]:
        """Wait for everything submitted since the last call, and return it by key.

        `progress(done, total)`, in samples, is called about once a second while it waits. `max_skipped` is the share
        of these samples that may be skipped; None leaves that to the caller (see `check_skipped`), who may know
        the other ranks' samples.

        Raises RewardTimeout or RewardError at the first failure of a reward with "fail", naming the reward and
        the sample, with the reward's own traceback; RunError for too many skipped samples. After an error
        nothing is pending and the scorer can be used again.
        """
        jobs = self._wait(progress, stop_early=True)
        self._stats = self._summarise(jobs)
        scored = {key: self._combine(job) for key, job in jobs.items()}
        if max_skipped is not None:
            skipped = [one for one in scored.values() if one.skipped]
            check_skipped(len(skipped), len(scored), max_skipped, example=skipped[0].failed if skipped else {})
        return scored

    def check(self) -> None:
        """Raise now what `collect` would raise first, be it a reward that cannot be loaded: it need not wait for
        the rollout's end."""
        if self._pool.fatal:
            raise self._pool.fatal
        if self._failures:
            self._wait(None, stop_early=True)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By reward name, for the last `collect`: `p50`, `p95` and `max` seconds, `slowest` (a sample's id),
        `count`, and `failed`."""
        return self._stats

    def canary(self, rows: Sequence[dict], response: str) -> dict[str, dict[str, Any]]:
        """Score one response against a few rows, for gate G9: whatever the policies, nothing is raised for a failure.

        By reward name: `values` (finite, one per row that worked), `failures` (one line each, naming the row)
        and `seconds` (the slowest). Leaves `stats` alone. Raises ValueError while samples are pending.
        """
        if self._jobs:
            raise ValueError("canary while samples are pending")
        for key, row in enumerate(rows):
            self.submit(key, response, row)
        jobs = self._wait(None, stop_early=False).values()
        report = {}
        for index, name in enumerate(self.names):
            outcomes = [(job.sample, job.outcomes[index]) for job in jobs]
            report[name] = {
                "values": [outcome.value for _, outcome in outcomes if outcome.kind == "ok"],
                "failures": [f"row {sample}: {o.error}" for sample, o in outcomes if o.kind != "ok"],
                "seconds": max((outcome.seconds for _, outcome in outcomes), default=0.0),
            }
        return report

    def _done(self, task: tuple[int, int, int] | None, outcome: Outcome) -> None:
        """Called in the pool's thread; a task of None says that the pool has ended."""
        with self._changed:
            if task is not None and task[0] == self._generation:
                _, key, index = task
                self._jobs[key].outcomes[index] = outcome
                self._open -= 1
                if outcome.kind != "ok" and self._specs[index].on_failure == "fail":
                    self._failures.append((key, index))
            self._changed.notify_all()

    def _wait(self, progress: Callable[[int, int], None] | None, stop_early: bool) -> dict[int, _Job]:
        """Every job, done; or the first failure raised. Either way nothing is pending afterwards."""
        try:
            while True:
                with self._changed:
                    if self._open and not self._pool.fatal and not (stop_early and self._failures):
                        self._changed.wait(1.0)
                    failures, left = list(self._failures), self._open
                    done = sum(None not in job.outcomes for job in self._jobs.values())
                if self._pool.fatal and left:
                    raise self._pool.fatal
                if stop_early and failures:
                    raise self._error(*failures[0])
                if not left:
                    return self._jobs
                if progress:
                    progress(done, len(self._jobs))
        finally:
            with self._changed:
                self._generation += 1
                if self._open:
                    self._pool.cancel()
                self._jobs, self._open, self._failures = {}, 0, []

    def _error(self, key: int, index: int) -> RewardError:
        job = self._jobs[key]
        outcome = job.outcomes[index]
        kind = RewardTimeout if outcome.kind == "timeout" else RewardError
        traceback = f"\n{outcome.traceback.rstrip()}" if outcome.traceback else ""
        return kind(f'reward "{self.names[index]}" failed on sample {job.sample}: {outcome.error}{traceback}')

    def _combine(self, job: _Job) -> Scored:
        scored = Scored()
        total = 0.0
        for name, spec, outcome in zip(self.names, self._specs, job.outcomes, strict=True):
            value = outcome.value
            if outcome.kind != "ok":
                scored.failed[name] = outcome.error.splitlines()[0]
                if spec.on_failure == "skip":
                    scored.skipped = True
                    continue
                value = float(spec.on_failure.removeprefix("value:"))
            scored.values[name] = value
            total += spec.weight * value
        scored.reward = math.nan if scored.skipped else total
        return scored

    def _summarise(self, jobs: dict[int, _Job]) -> dict[str, dict[str, Any]]:
        stats = {}
        for index, name in enumerate(self.names):
            timed = sorted((job.outcomes[index].seconds, job.sample) for job in jobs.values())
            if timed:
                seconds = [second for second, _ in timed]
                stats[name] = {
                    "p50": statistics.median(seconds),
                    "p95": seconds[math.ceil(0.95 * len(seconds)) - 1],
                    "max": seconds[-1],
                    "slowest": timed[-1][1],
                    "count": len(seconds),
                    "failed": sum(job.outcomes[index].kind != "ok" for job in jobs.values()),
                }
        return stats


def check_skipped(
    skipped: int, total: int, limit: float = MAX_SKIPPED, *, example: dict[str, str] | None = None
) -> None:
    """Raise RunError if more than `limit` of a step's samples were skipped for a failed reward."""
    if skipped > limit * total:
        why = "".join(f'\n  for example "{name}": {error}' for name, error in (example or {}).items())
        raise RunError(
            f"rewards failed on {skipped} of {total} samples ({skipped / total:.1%}), and on_failure = "
            f'"skip" allows {limit:.0%} of a step{why}'
        )


def default_workers(ranks: int = 1) -> int:
    """Processes for each of the `ranks` of this machine: its cores shared out, from 1 to 8."""
    return max(1, min(8, (os.cpu_count() or 1) // ranks))
