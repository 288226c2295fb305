"""What a checkpoint folder holds, read without a module to put it into: names, shapes, and whole tensors on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from omnitrain.errors import ModelError, RunError
from omnitrain.rundir import MANIFEST, latest_checkpoint, read_manifest


def find_checkpoint(path: Path, field: str) -> Path:
    """The newest whole checkpoint of a run directory, or `path` itself if it is a checkpoint.

    Raises:
        ModelError: naming the recipe's `field`, if there is none or it is damaged.
    """
    if not (path / MANIFEST).exists():
        newest, skipped = latest_checkpoint(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        if newest is None:
            raise ModelError("; ".join([f"{field} = {path} holds no whole checkpoint", *skipped]))
        path = newest
    try:
        read_manifest(path)
    except RunError as error:
        raise ModelError(f"{field}: {error}") from error
    return path


def stored(path: Path, section: str) -> dict[str, dict[str, Any]]:
    """{parameter: {key: tensor metadata}} of a checkpoint's section; the only key of weights is ""."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    found: dict[str, dict[str, Any]] = {}
    for flat, place in metadata.planner_data.items():
        if place[0] == section:
            found.setdefault(place[1], {})["/".join(place[2:])] = metadata.state_dict_metadata[flat]
    return found


def shapes(path: Path, section: str = "model") -> dict[str, torch.Size]:
    """Shapes of the weights in a section ("model" or "ema"), by name; empty if there is no such section."""
    return {name: keys[""].size for name, keys in stored(path, section).items()}


def read_whole(path: Path, names: Iterable[str], section: str = "model") -> dict[str, Tensor]:
    """These weights, whole and on the CPU, whatever the number of ranks that wrote them. Needs no process group."""
    known = stored(path, section)
    tensors = {name: torch.empty(known[name][""].size, dtype=known[name][""].properties.dtype) for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is meant
        dcp.load({section: tensors}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def match(path: Path, state: dict[str, Tensor], kind: type[Exception]) -> None:
    """Raise `kind` unless the checkpoint's weights are those of `state`, with its shapes."""
    known = shapes(path)
    problems = [f"{name} is not in it" for name in state.keys() - known.keys()]
    problems += [f"{name} is in it but is not trained here" for name in known.keys() - state.keys()]
    problems += [
        f"{name} has shape {tuple(known[name])}, here {tuple(state[name].shape)}"
        for name in state.keys() & known.keys()
        if known[name] != state[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise kind(f"{path} is of other trained parameters: {'; '.join(sorted(problems)[:3])}{more}")
