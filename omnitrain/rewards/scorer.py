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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrain.errors import OmnitrainError, RewardError, RewardTimeout, RunError, UsageError
from omnitrain.rewards import ENDPOINTS, fields, reward_names
from omnitrain.rewards.endpoints import EndpointPool
from omnitrain.rewards.pool import Outcome, Pool

if TYPE_CHECKING:
    from omnitrain.recipe.rewards import Reward

MAX_SKIPPED = 0.05
"""Largest share of a step's samples that `on_failure = "skip"` may leave out."""


@dataclass
class Scored:
    """One sample's rewards."""

    values: dict[str, float] = field(default_factory=dict)
    """By reward name, unweighted. One for other sources is absent; a failed one too, or it holds x under "value:x"."""
    failed: dict[str, str] = field(default_factory=dict)
    """By reward name, why it failed: one line."""
    reward: float = math.nan
    """Weighted sum of those that score the row's source; NaN if the sample is skipped."""
    skipped: bool = False
    """A reward failed under "skip": the sample belongs in no statistic and no update."""


@dataclass
class _Job:
    sample: str
    outcomes: dict[int, Outcome | None]
    """By the reward's index, for those that score the row's source."""


class Scorer:
    """Runs the rewards of a recipe: on `workers` processes of its own, and in one thread those that ask a server.

    Close it, or use it in a `with`. Start it before the accelerator is touched. `log` is a file that receives what
    the rewards print and each `collect`'s slowest samples; without it that is dropped. With `wait=False` the start
    is not waited for, and what it would raise is raised by `wait_ready`, `collect` or `canary`: UsageError naming
    the recipe's field for a reward that cannot be loaded, RunError for an endpoint that does not answer.
    """

    def __init__(self, specs: Sequence["Reward"], workers: int = 2, *, log: Path | None = None, wait: bool = True):
        self.names = reward_names(specs)
        self.kinds = dict(zip(self.names, (spec.kind for spec in specs), strict=True))
        """By name, the rewards' kinds."""
        self.weights = dict(zip(self.names, (spec.weight for spec in specs), strict=True))
        """By name, the rewards' weights."""
        self._specs = list(specs)
        self._jobs: dict[int, _Job] = {}
        self._generation = 0
        self._open = 0
        self._failures: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        self._stats: dict[str, dict[str, Any]] = {}
        self._log = log
        remote = [index for index, spec in enumerate(specs) if spec.kind in ENDPOINTS]
        local = [index for index in range(len(specs)) if index not in remote]
        # Each reward's index within its pool.
        self._places = {index: place for group in (local, remote) for place, index in enumerate(group)}
        self._pool = self._endpoints = None
        if local:
            tables = [(f"rewards[{index}]", fields(specs[index])) for index in local]
            self._pool = Pool(tables, workers, self._done, log)
        if remote:
            self._endpoints = EndpointPool([(f"rewards[{index}]", specs[index]) for index in remote], self._done)
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and drop the requests at once, whatever they are doing."""
        for pool in self._pools:
            pool.close()

    def wait_ready(self) -> None:
        """Wait until every reward is loaded and every endpoint has answered; raises what does not work."""
        for pool in reversed(self._pools):
            pool.wait_ready()

    @property
    def _pools(self) -> list[Pool | EndpointPool]:
        return [pool for pool in (self._pool, self._endpoints) if pool]

    @property
    def _fatal(self) -> OmnitrainError | None:
        return next((pool.fatal for pool in self._pools if pool.fatal), None)

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return self._pool.pids if self._pool else []

    def rewards_of(self, source: str) -> list[int]:
        """Indices of the rewards that score rows of this source."""
        return [i for i, spec in enumerate(self._specs) if not getattr(spec, "sources", None) or source in spec.sources]

    def check_sources(self, sources: Collection[str]) -> None:
        """Raise UsageError for a source that no reward scores, and for a reward's source that is not among them."""
        known = ", ".join(sorted(sources))
        for source in sorted(sources):
            if not self.rewards_of(source):
                raise UsageError(
                    f'no reward scores the rows of source "{source}"; add it to a rewards[].sources, or leave '
                    "sources out of one"
                )
        for index, spec in enumerate(self._specs):
            for source in getattr(spec, "sources", None) or []:
                if source not in sources:
                    raise UsageError(f'rewards[{index}].sources: no row has the source "{source}"; they have {known}')

    def submit(self, key: int, response: str, row: dict) -> None:
        """Start scoring a response by the rewards of its row's source; returns at once.

        row: what `facts` gives, all picklable; `id` and `source` at least.

        Raises ValueError for a key that is waiting to be collected, UsageError for a row that no reward scores.
        """
        if key in self._jobs:
            raise ValueError(f"sample {key} was submitted twice")
        indices = self.rewards_of(row["source"])
        if not indices:
            raise UsageError(f'no reward scores row {row["id"]} of source "{row["source"]}"; see rewards[].sources')
        local = [index for index in indices if self._specs[index].kind not in ENDPOINTS]
        messages = {index: pickle.dumps((self._places[index], response, row)) for index in local}
        with self._changed:
            self._jobs[key] = _Job(str(row["id"]), dict.fromkeys(indices))
            self._open += len(indices)
        for index in indices:
            task, timeout = (self._generation, key, index), self._specs[index].timeout
            if index in messages:
                self._pool.put(task, messages[index], timeout)
            else:
                self._endpoints.put(task, self._places[index], response, row, timeout)

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
        self._note_slowest()
        scored = {key: self._combine(job) for key, job in jobs.items()}
        if max_skipped is not None:
            skipped = [one for one in scored.values() if one.skipped]
            check_skipped(len(skipped), len(scored), max_skipped, example=skipped[0].failed if skipped else {})
        return scored

    def check(self) -> None:
        """Raise now what `collect` would raise first, be it a reward that cannot be loaded: it need not wait for
        the rollout's end."""
        if self._fatal:
            raise self._fatal
        if self._failures:
            self._wait(None, stop_early=True)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By reward name, for the samples of the last `collect` that it scored: `p50`, `p95` and `max` seconds,
        `slowest` (a sample's id), `count`, and `failed`."""
        return self._stats

    def canary(self, rows: Sequence[dict], response: str) -> dict[str, dict[str, Any]]:
        """Score one response against a few rows, for gate G9: whatever the policies, nothing is raised for a failure.

        By reward name: `values` (finite, one per row of its sources that worked), `failures` (one line each, naming the row)
        and `seconds` (the slowest). Leaves `stats` alone. Raises ValueError while samples are pending.
        """
        if self._jobs:
            raise ValueError("canary while samples are pending")
        for key, row in enumerate(rows):
            self.submit(key, response, row)
        jobs = self._wait(None, stop_early=False).values()
        report = {}
        for index, name in enumerate(self.names):
            outcomes = [(job.sample, job.outcomes[index]) for job in jobs if index in job.outcomes]
            report[name] = {
                "values": [outcome.value for _, outcome in outcomes if outcome.kind == "ok"],
                "failures": [f"row {sample}: {o.error}" for sample, o in outcomes if o.kind != "ok"],
                "seconds": max((outcome.seconds for _, outcome in outcomes), default=0.0),
            }
        return report

    def _done(self, task: tuple[int, int, int] | None, outcome: Outcome) -> None:
        """Called in a pool's thread; a task of None says that this pool has ended."""
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
                    if self._open and not self._fatal and not (stop_early and self._failures):
                        self._changed.wait(1.0)
                    failures, left = list(self._failures), self._open
                    done = sum(None not in job.outcomes.values() for job in self._jobs.values())
                if self._fatal and left:
                    raise self._fatal
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
                    for pool in self._pools:
                        pool.cancel()
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
        for index, outcome in job.outcomes.items():
            name, spec, value = self.names[index], self._specs[index], outcome.value
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
            mine = [(job.sample, job.outcomes[index]) for job in jobs.values() if index in job.outcomes]
            timed = sorted((outcome.seconds, sample) for sample, outcome in mine)
            if timed:
                seconds = [second for second, _ in timed]
                stats[name] = {
                    "p50": statistics.median(seconds),
                    "p95": seconds[math.ceil(0.95 * len(seconds)) - 1],
                    "max": seconds[-1],
                    "slowest": timed[-1][1],
                    "count": len(seconds),
                    "failed": sum(outcome.kind != "ok" for _, outcome in mine),
                }
        return stats

    def _note_slowest(self) -> None:
        """A line for each reward into the log, so that a slow one can be told by its sample."""
        if self._log is None or not self._stats:
            return
        with self._log.open("a", encoding="utf-8") as file:
            for name, found in self._stats.items():
                file.write(
                    f"omnitrain: {name}: {found['count']} samples, {found['failed']} failed; seconds p50 {found['p50']:.3g}, "
                    f"p95 {found['p95']:.3g}, slowest {found['max']:.3g} on sample {found['slowest']}\n"
                )


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
