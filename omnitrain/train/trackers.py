"""Optional sinks beside metrics.jsonl. They never stop a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from omnitrain.errors import OmnitrainError, RunError
from omnitrain.recipe.schema import Recipe


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard events in `logs`."""

    def __init__(self, logs: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError("trackers.tensorboard needs the tensorboard package: pip install tensorboard") from error
        self._writer = SummaryWriter(str(logs))

    def log(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """Weights & Biases; without an API key or a network it writes an offline run that `wandb sync` uploads."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise RunError("trackers.wandb needs the wandb package: pip install wandb") from error
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._run = wandb.init(
            project=recipe.trackers.wandb.project,
            name=recipe.name,
            dir=str(path),
            mode=os.environ.get("WANDB_MODE", mode),
            config=recipe.model_dump(mode="json", by_alias=True),
        )

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """All trackers of a run. One that fails is dropped with a warning; metrics.jsonl has everything anyway."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, values: dict[str, Any]) -> None:
        for tracker in list(self._trackers):
            try:
                tracker.log(step, values)
            except Exception as error:  # noqa: BLE001 a sink must not stop a run
                print(f"warning: {type(tracker).__name__} failed and is left out from now on: {error}", file=sys.stderr)
                self._trackers.remove(tracker)

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 a sink must not stop a run, nor make a finished one a failure
                print(f"warning: {type(tracker).__name__} could not be closed: {error}", file=sys.stderr)


def build_sinks(recipe: Recipe, path: Path) -> Sinks:
    """The sinks that the recipe names; one that cannot be started is left out with a warning.

    Raises:
        RunError: a sink's package is not installed.
    """
    builders: list[Callable[[], Tracker]] = []
    if recipe.trackers.tensorboard:
        builders.append(lambda: TensorBoard(path / "logs"))
    if recipe.trackers.wandb:
        builders.append(lambda: WandbRun(recipe, path))
    trackers: list[Tracker] = []
    for build in builders:
        try:
            trackers.append(build())
        except OmnitrainError:
            raise
        except Exception as error:  # noqa: BLE001 no network is no reason not to train
            print(f"warning: a tracker could not be started and is left out: {error}", file=sys.stderr)
    return Sinks(trackers)
