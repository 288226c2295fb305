"""From a run's checkpoint to files that other tools load. One process, no accelerator; nothing half-written stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from omnitrain.errors import ModelError, RunError, UsageError
from omnitrain.models.qwen3_omni import lora
from omnitrain.models.qwen3_omni.export import write_adapter, write_merged
from omnitrain.models.qwen3_omni.weights import Checkpoint
from omnitrain.recipe.schema import Recipe
from omnitrain.rundir import RunDir, checkpoint_step, read_manifest, whole_checkpoints
from omnitrain.train.stored import read_whole, shapes


@dataclass(frozen=True)
class Trained:
    """The trained weights of one checkpoint, by plain name, read when asked for."""

    path: Path
    recipe: Recipe
    ema: bool
    stored: dict[str, str]
    """The checkpoint's name of each plain name."""
    shapes: dict[str, torch.Size]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        found = read_whole(self.path, [self.stored[name] for name in names], "ema" if self.ema else "model")
        return {name: found[self.stored[name]] for name in names}


def open_trained(path: Path, recipe: Recipe, ema: bool = False) -> Trained:
    """The trained weights of the checkpoint `path` of a run of `recipe`, or their moving average.

    Raises UsageError if `ema` is asked for and the checkpoint holds none, ModelError if it is of another recipe.
    """
    found = shapes(path, "ema" if ema else "model")
    if ema and not found:
        raise UsageError(f"{path} holds no moving average: the run had no train.ema; export without --ema")
    targets = recipe.model.lora.module_names() if recipe.model.lora else []
    stored = {lora.plain_name(name, targets): name for name in found}
    if any(map(lora.is_adapter, stored)) != bool(recipe.model.lora):
        raise ModelError(f"{path} does not belong to the recipe beside it: one has an adapter, the other has not")
    return Trained(path, recipe, ema, stored, {plain: found[name] for plain, name in stored.items()})


def export(
    run: RunDir,
    *,
    step: int | None = None,
    best: bool = False,
    out: Path | None = None,
    merged: bool = False,
    ema: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a checkpoint of `run` as a PEFT adapter, or with `merged` as a checkpoint in the published layout.

    step, best: which checkpoint; neither is the newest. out: default RUN/exports/step_N-adapter or -merged.

    Raises:
        UsageError: no run, no such checkpoint, an output directory that is not empty, or options that do not fit the run.
        ModelError: the base checkpoint is not there or does not fit.
        RunError: it cannot be written; nothing is left of it.
    """
    if not run.recipe_file.is_file():
        raise UsageError(f"{run.path} is no run directory (it holds no recipe.toml)")
    recipe = run.recipe()
    path = choose(run, recipe, step, best)
    if recipe.model.lora is None and not merged:
        raise UsageError(f"{run.path} trained all parameters, so there is no adapter; export it with --merged")
    trained = open_trained(path, recipe, ema)
    kind = "merged" if merged else "adapter"
    out = (out or run.path / "exports" / f"{path.name}-{kind}{'-ema' if ema else ''}").absolute()
    base = Checkpoint(recipe.model.path) if merged else None
    count = sum((base.path / file).stat().st_size for file in base.files()) if merged else _bytes(trained)
    with new_directory(out, count) as folder:
        if merged:
            write_merged(folder, base, trained.shapes, trained.read, recipe.model.lora, say)
        else:
            write_adapter(folder, trained.read([*trained.stored]), recipe.model.lora, recipe.model.path)
    return out


def choose(run: RunDir, recipe: Recipe, step: int | None, best: bool) -> Path:
    """The checkpoint to export. Raises UsageError naming those there are."""
    whole, skipped = whole_checkpoints(run.checkpoints)
    if not whole:
        raise UsageError("; ".join([f"{run.path} has no whole checkpoint to export", *skipped]))
    if best:
        rule = recipe.checkpoint.keep_best
        if rule is None:
            raise UsageError(f"--best: the recipe of {run.path} has no checkpoint.keep_best; choose with --step: {_steps(whole)}")
        scored = [(read_manifest(path)["metrics"].get(rule.metric), path) for path in whole]
        scored = [(value, path) for value, path in scored if value is not None]
        if not scored:
            raise UsageError(f"--best: no checkpoint of {run.path} has {rule.metric}; choose with --step: {_steps(whole)}")
        return (max if rule.mode == "max" else min)(scored, key=lambda item: item[0])[1]
    if step is None:
        return whole[-1]
    found = next((path for path in whole if checkpoint_step(path) == step), None)
    if found is None:
        lines = [line for line in skipped if f"step_{step} " in line or f"step_{step}/" in line]
        raise UsageError("; ".join([f"--step {step}: {run.path} has checkpoints of {_steps(whole)}", *lines]))
    return found


@contextmanager
def new_directory(out: Path, needed: int = 0) -> Iterator[Path]:
    """A directory to fill, which gets the name `out` if the block ends well and is removed otherwise.

    Raises UsageError if `out` holds anything, RunError if it cannot be written or `needed` bytes are not free.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; remove it or choose another --out")
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed:
            raise RunError(f"{out} needs {_gib(needed)}, {_gib(free)} are free there; make room or choose another --out")
        yield temporary
        _share(temporary)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except SafetensorError as error:
        raise RunError(f"{out} cannot be written: {error}") from error
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}; choose another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _share(folder: Path) -> None:
    """Give every file the mode that new files have here: safetensors writes its own for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~mask)


def _bytes(trained: Trained) -> int:
    return sum(shape.numel() * 4 for shape in trained.shapes.values())


def _steps(whole: list[Path]) -> str:
    steps = [str(checkpoint_step(path)) for path in whole]
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(steps)}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
