"""What both loops are given: the recipe, the ranks, the policy, the rows and the run directory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omnitrain.data.files import RowFiles
from omnitrain.errors import Interrupted
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.recipe.schema import Recipe
from omnitrain.rundir import RunDir, stop_requested
from omnitrain.train.checkpoint import Checkpointer
from omnitrain.train.console import Console
from omnitrain.train.distributed import Ranks
from omnitrain.train.metrics import MetricsFile
from omnitrain.train.notices import Notices
from omnitrain.train.profile import phase_range
from omnitrain.train.trackers import Sinks


@dataclass
class Context:
    """The parts of a run that do not depend on its algorithm."""

    recipe: Recipe
    run: RunDir
    ranks: Ranks
    policy: ThinkerPolicy
    processing: Processing
    train_rows: RowFiles
    validation_rows: RowFiles | None
    checkpointer: Checkpointer
    console: Console
    metrics: MetricsFile | None
    """Rank 0's alone."""
    sinks: Sinks | None
    """Rank 0's alone."""

    def __post_init__(self) -> None:
        self._notices = Notices(self.console.say)

    def log(self, values: dict[str, Any]) -> None:
        """Write one step's metrics; a no-op except on rank 0."""
        if self.metrics:
            self.metrics.write(values)
            self.sinks.log(values["step"], values)
            self.console.step(values)
            self._notices.step(values)

    def finish(self, steps: int, updates: int) -> None:
        """Say that the run is done and where its results are."""
        self._notices.end()
        kinds = "metrics, samples, checkpoints" if self.recipe.algorithm.online else "metrics, checkpoints"
        self.console.say(f"done: {steps} steps, {updates} updates; {kinds} and plots in {self.run.path}")

    def stop(self) -> str | None:
        """What the user asked for: None, "step" or "update". Agreed by all ranks.

        Any rank's view counts, since a rank that saw the file during the rollout has left prompts unanswered.
        """
        seen = self.ranks.gather(stop_requested(self.run))
        return next((when for when in ("update", "step") if when in seen), None)

    def stop_wanted(self) -> str | None:
        """The same as this process sees it now, without asking the others."""
        return stop_requested(self.run)

    def total_steps(self) -> int:
        """Steps of the whole run: max_steps, or what the epochs come to, whichever is less."""
        spec = self.recipe.train
        limits = []
        if spec.max_steps:
            limits.append(spec.max_steps)
        if spec.epochs:
            limits.append(max(1, spec.epochs * len(self.train_rows) // spec.prompts_per_step))
        return min(limits)

    def check_start(self, step: int) -> None:
        """Between the parts of a start-up, before the first step, which is `step`. Collective.

        Raises:
            Interrupted: the user asked to stop. Nothing was trained yet, so nothing is saved.
        """
        if self.stop():
            raise Interrupted(f"stopped before step {step}; nothing new to save")

    def interrupted(self, step: int) -> Interrupted:
        return Interrupted(f"stopped after step {step}; run the same command again to go on")


@dataclass
class Clock:
    """Seconds per phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to time/<name>."""
        start = time.perf_counter()
        try:
            with phase_range(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}
