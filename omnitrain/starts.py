"""Where a run's weights start from, `model.init_from` and `model.adapter`: looked at without torch, before a rank starts.

The ranks look again, at the tensors themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnitrain.errors import OmnitrainError, RunError
from omnitrain.recipe.schema import Recipe
from omnitrain.rundir import MANIFEST, RunDir, latest_checkpoint, read_manifest

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def problem(recipe: Recipe) -> str | None:
    """What is wrong with the recipe's start, in a line that begins with the field; None if nothing is."""
    if recipe.model.adapter is not None:
        return _adapter(recipe, Path(recipe.model.adapter))
    return _weights(recipe, Path(recipe.model.init_from)) if recipe.model.init_from is not None else None


def _weights(recipe: Recipe, given: Path) -> str | None:
    head = f"model.init_from = {given}"
    if missing := _no_checkpoint(given):
        return f"{head} {missing}"
    source = _recipe_of(given)
    if source is None:
        return None
    theirs, ours = source.model.lora, recipe.model.lora
    if theirs is None and ours is not None:
        return (
            f"{head} trained all parameters, and this recipe an adapter; remove model.lora, or export that run with "
            "--merged and make it model.path"
        )
    if theirs is not None and ours is None:
        return (
            f"{head} trained an adapter, and this recipe has no model.lora; add it with rank {theirs.rank}, or export "
            "that run with --merged and make it model.path"
        )
    return _differing(head, [("rank", theirs.rank, ours.rank), _targets(theirs, ours)]) if ours is not None else None


def _adapter(recipe: Recipe, given: Path) -> str | None:
    head, ours = f"model.adapter = {given}", recipe.model.lora
    if (given / _ADAPTER_CONFIG).is_file() or (given / _ADAPTER_WEIGHTS).is_file():
        try:
            config = json.loads((given / _ADAPTER_CONFIG).read_text())
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{head} has no readable {_ADAPTER_CONFIG} ({error}); export or copy it again"
        if not (given / _ADAPTER_WEIGHTS).is_file():
            return f"{head} has no {_ADAPTER_WEIGHTS}; export or copy it again"
        return _differing(head, [("rank", rank, ours.rank), ("alpha", alpha, ours.alpha)])
    if not given.exists():
        return f"{head} does not exist; name a run directory or an exported adapter"
    if not (_run_of(given).recipe_file.is_file()):
        return f"{head} is neither a run directory (recipe.toml) nor an adapter ({_ADAPTER_CONFIG})"
    if missing := _no_checkpoint(given):
        return f"{head} {missing}"
    source = _recipe_of(given)
    if source is None:
        return None
    theirs = source.model.lora
    if theirs is None:
        return (
            f"{head} trained all parameters and has no adapter; take its weights with model.init_from and without "
            "model.lora"
        )
    settings = [("rank", theirs.rank, ours.rank), ("alpha", theirs.alpha, ours.alpha), _targets(theirs, ours)]
    return _differing(head, settings)


def _no_checkpoint(given: Path) -> str | None:
    """Why there is no whole checkpoint in a run directory, or why `given` is not one itself."""
    if not given.is_dir():
        return "is a file; name a run directory" if given.exists() else "does not exist; name a run directory"
    if (given / MANIFEST).exists():
        try:
            read_manifest(given)
        except RunError as error:
            return f"is no whole checkpoint: {error}"
        return None
    folder = given / "checkpoints"
    newest, skipped = latest_checkpoint(folder if folder.is_dir() else given)
    if newest is not None:
        return None
    return "; ".join(["holds no whole checkpoint; train that run first, or correct the path", *skipped])


def _run_of(given: Path) -> RunDir:
    """The run directory of `given`, which may be one of its checkpoints."""
    return RunDir(given.parent.parent if (given / MANIFEST).is_file() else given)


def _recipe_of(given: Path) -> Recipe | None:
    """The recipe beside the checkpoints, None where there is none that this version reads."""
    try:
        return _run_of(given).recipe()
    except OmnitrainError:
        return None


def _targets(theirs: Any, ours: Any) -> tuple[str, list[str], list[str]]:
    return "targets", sorted(theirs.module_names()), sorted(ours.module_names())


def _differing(head: str, settings: list[tuple[str, Any, Any]]) -> str | None:
    for name, theirs, ours in settings:
        if theirs != ours:
            return (
                f"{head} has {name} {json.dumps(theirs)}, and model.lora.{name} is {json.dumps(ours)}; set "
                f"model.lora.{name} = {json.dumps(theirs)}, or start from another run"
            )
    return None
