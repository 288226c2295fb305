"""Checkpoints by torch.distributed.checkpoint: whole or not at all, and loadable on another number of ranks.

checkpoints/step_N/ holds the sharded tensors (`*.distcp`, `.metadata`: weights, optimizer, moving average), `extra.pt`
(scheduler, rng of every rank, sampler position, counters) and `manifest.json`, which is written last. It is written as .tmp_step_N and renamed.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import omnitrain
from omnitrain.errors import ModelError, RunError
from omnitrain.rundir import MANIFEST, latest_checkpoint, read_manifest, whole_checkpoints, write_atomic
from omnitrain.train.checkpoint_state import (
    bits,
    clean,
    device_of,
    hyperparameters,
    local_bytes,
    map_tensors,
    optimizer_state,
    rng_state,
    set_rng_state,
    tensors,
    trainable_state,
)
from omnitrain.train.stored import find_checkpoint, match, stored

_EXTRA = "extra.pt"


@dataclass(frozen=True)
class RoundTrip:
    """What gate G10 measured."""

    tensors: int
    bytes: int
    """Of all ranks together."""
    seconds: float
    unequal: list[str]
    """Names whose bits came back changed, on any rank."""


class Checkpointer:
    """Writes and reads the checkpoints of one run. Every method is collective: all ranks call it."""

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: tuple[str, str] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """`directory` is the run's checkpoints folder; `keep_best` is (metric, "max" or "min"); rank 0 calls `say`."""
        self.directory = Path(directory)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._say = say

    def save(
        self,
        step: int,
        module: Module,
        optimizer: Optimizer,
        scheduler: Any,
        extra: dict[str, Any],
        metrics: dict[str, Any] | None = None,
        averages: dict[str, Tensor] | None = None,
    ) -> Path:
        """Write the state after `step`, then drop what keep_last and keep_best do not keep.

        `extra` holds plain values and tensors, equal on all ranks. `metrics` is where keep_best finds its metric.
        `averages` is the weights' moving average (Ema.averages).

        Raises:
            RunError: on all ranks; nothing half-written stays and earlier checkpoints are untouched.
        """
        target, temporary = self.directory / f"step_{step}", self.directory / f".tmp_step_{step}"
        state = {"model": trainable_state(module), "optimizer": optimizer_state(module, optimizer)}
        if averages:
            state["ema"] = {clean(name): average for name, average in averages.items()}
        rngs = _gather(rng_state(device_of(state["model"])))
        size = sum(_gather(local_bytes(state)))

        def open_folder() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        def finish() -> None:
            head = {
                "extra": extra,
                "scheduler": scheduler.state_dict(),
                "groups": hyperparameters(optimizer),
                "rng": rngs,
            }
            buffer = io.BytesIO()
            torch.save(head, buffer)
            (temporary / _EXTRA).write_bytes(buffer.getbuffer())
            _sync_files(temporary)
            files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
            manifest = {
                "step": step,
                "world_size": len(rngs),
                "files": files,
                "metrics": {
                    name: v for name, v in (metrics or {}).items() if isinstance(v, (int, float)) and math.isfinite(v)
                },
                "versions": {
                    "omnitrain": omnitrain.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "time": time.time(),
            }
            write_atomic(temporary / MANIFEST, json.dumps(manifest, indent=1))
            _sync_directory(temporary)
            if target.exists():  # of the same step, damaged or written before the recipe was changed
                shutil.rmtree(target)
            os.rename(temporary, target)
            _sync_directory(self.directory)

        try:
            _on_main(open_folder)
            _write(state, temporary)
            _on_main(finish)
        except (OSError, RuntimeError, dcp.CheckpointException, RunError) as error:
            if _main():
                shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(self._failure(target, size, error)) from error
        _on_main(self._prune)
        return target

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None. Rank 0 says which ones it skipped."""
        found = _broadcast(latest_checkpoint(self.directory) if _main() else None)
        if _main():
            for line in found[1]:
                self._say(line)
        return found[0]

    def load(
        self,
        path: Path,
        module: Module,
        optimizer: Optimizer,
        scheduler: Any,
        averages: dict[str, Tensor] | None = None,
    ) -> dict[str, Any]:
        """Put a checkpoint's state into place and return its `extra`. The number of ranks may differ from the writer's;
        then each rank's random state cannot be restored, which rank 0 says. `averages` are left as they are if the
        checkpoint holds none.

        Raises:
            RunError: damaged, or of other trained parameters.
        """
        manifest = read_manifest(path)
        model = trainable_state(module)
        match(path, model, RunError)
        _read({"model": model}, path)
        if averages and stored(path, "ema"):
            _read({"ema": {clean(name): average for name, average in averages.items()}}, path)
        _load_optimizer(path, module, optimizer)
        # Plain containers and tensors only, so that a checkpoint from elsewhere cannot run code.
        head = torch.load(path / _EXTRA, map_location="cpu", weights_only=True)
        for group, values in zip(optimizer.param_groups, head["groups"], strict=True):
            group.update(values)
        scheduler.load_state_dict(head["scheduler"])
        world = dist.get_world_size() if dist.is_initialized() else 1
        if manifest["world_size"] == world:
            set_rng_state(head["rng"][dist.get_rank() if dist.is_initialized() else 0], device_of(model))
        elif _main():
            self._say(
                f"{path.name} was written by {manifest['world_size']} ranks, this run has {world}: random states start anew"
            )
        return head["extra"]

    def round_trip(self, module: Module, optimizer: Optimizer) -> RoundTrip:
        """Gate G10: write the real sharded trainable state to a temporary folder, read it into copies, compare bits."""
        start = time.perf_counter()
        state = {"model": trainable_state(module), "optimizer": optimizer_state(module, optimizer)}
        folder = self.directory / ".tmp_g10"
        size = sum(_gather(local_bytes(state)))
        try:
            _on_main(lambda: (shutil.rmtree(folder, ignore_errors=True), folder.mkdir(parents=True)))
            _write(state, folder)
            copies = map_tensors(state, torch.zeros_like)
            _read(copies, folder)
        except (OSError, RuntimeError, dcp.CheckpointException, RunError) as error:
            raise RunError(self._failure(folder, size, error)) from error
        finally:
            if _main():
                shutil.rmtree(folder, ignore_errors=True)
        written, back = dict(tensors(state)), dict(tensors(copies))
        unequal = [name for name, tensor in written.items() if not torch.equal(bits(tensor), bits(back[name]))]
        unequal = sorted(set(sum(_gather(unequal), [])))
        return RoundTrip(len(written), size, time.perf_counter() - start, unequal)

    def _prune(self) -> None:
        whole, _ = whole_checkpoints(self.directory)
        keep = set(whole[-self._keep_last :])
        if self._keep_best:
            metric, mode = self._keep_best
            scored = [(read_manifest(path)["metrics"].get(metric), path) for path in whole]
            scored = [(value, path) for value, path in scored if value is not None]
            if scored:
                keep.add((max if mode == "max" else min)(scored, key=lambda item: item[0])[1])
        for path in whole:
            if path not in keep:
                # Renamed first: a removal that is cut short leaves nothing that looks like a checkpoint.
                gone = path.with_name(f".old_{path.name}")
                os.rename(path, gone)
                shutil.rmtree(gone)

    def _failure(self, target: Path, size: int, error: BaseException) -> str:
        free = shutil.disk_usage(self.directory if self.directory.exists() else self.directory.parent).free
        newest, _ = latest_checkpoint(self.directory)
        kept = f"the last whole checkpoint is {newest}" if newest else "there is no earlier checkpoint"
        cause = _cause(error)
        full = "No space left" in cause or free < size
        what = f"no space for checkpoint {target}" if full else f"cannot write checkpoint {target}"
        hint = "make room or lower checkpoint.keep_last; " if full else ""
        return f"{what}: it needs {_mib(size)}, {_mib(free)} are free there ({cause}); {hint}{kept}"


def load_trainable(path: Path, module: Module) -> None:
    """Start from another run's trained weights (`model.init_from`): a run directory or one of its checkpoints. Collective.

    Raises:
        ModelError: no whole checkpoint there, or of other trained parameters.
    """
    path = find_checkpoint(Path(path), "model.init_from")
    state = trainable_state(module)
    match(path, state, ModelError)
    _read({"model": state}, path)


# ---- reading into place


def _load_optimizer(path: Path, module: Module, optimizer: Optimizer) -> None:
    parameters = {clean(name): parameter for name, parameter in module.named_parameters()}
    state: dict[str, dict[str, Tensor]] = {}
    for name, keys in stored(path, "optimizer").items():
        parameter = parameters[name]
        state[name] = {
            key: torch.zeros_like(parameter, dtype=meta.properties.dtype, requires_grad=False)
            if meta.size == parameter.shape
            else torch.zeros(meta.size, dtype=meta.properties.dtype)
            for key, meta in keys.items()
        }
    if state:
        _read({"optimizer": state}, path)
    optimizer.state.clear()
    for name, values in state.items():
        optimizer.state[parameters[name]] = values


# ---- all ranks together


def _main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _broadcast(value: Any) -> Any:
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _on_main(action: Callable[[], Any]) -> None:
    """Do it on rank 0; an error there stays what it is, and is a RunError on the other ranks."""
    problem = None
    if _main():
        try:
            action()
        except Exception as error:
            problem = error
    text = _broadcast(f"{type(problem).__name__}: {problem}" if problem else None)
    if problem is not None:
        raise problem
    if text is not None:
        raise RunError(f"rank 0: {text}")


def _write(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=not dist.is_initialized())


def _read(state: dict[str, Any], folder: Path) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=not dist.is_initialized())


def _sync_files(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """One line for an error, without torch's frames."""
    if isinstance(error, dcp.CheckpointException):
        ranks = sorted(error.failures.items())
        return "; ".join(f"rank {rank}: {_cause(failure[0])}" for rank, failure in ranks[:2])
    seen = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    lines = str(seen or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _mib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
