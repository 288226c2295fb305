"""`model.adapter`: the adapter a run starts from, which is also its reference.

It is copied into the run directory at the start, as starting_adapter/ in PEFT's format, and read from there on resume: the
run it came from may have moved on, or be gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from omnitrain.errors import ModelError, OmnitrainError
from omnitrain.export import new_directory, open_trained
from omnitrain.models.qwen3_omni.export import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    StoredAdapter,
    check_adapter,
    read_adapter,
    write_adapter,
)
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.recipe.schema import Recipe
from omnitrain.rundir import MANIFEST, RunDir, latest_checkpoint
from omnitrain.train.distributed import Ranks
from omnitrain.train.stored import find_checkpoint

_FIELD = "model.adapter"


def start_adapter(recipe: Recipe, run: RunDir, policy: ThinkerPolicy, ranks: Ranks, say: Callable[[str], None]) -> None:
    """Give the policy the starting adapter of `model.adapter`, as its trained one and as its reference. Collective.

    Raises:
        ModelError: on all ranks: nothing usable there, or of another rank, other targets or another model.
    """
    folder = run.starting_adapter
    problem = None
    if ranks.main:
        try:
            _store(recipe, run, say)
        except OmnitrainError as error:
            problem = str(error)
    if problem := ranks.broadcast(problem):
        raise ModelError(problem)
    found = read_adapter(folder)
    check_adapter(found, recipe.model.lora, recipe.model.adapter)
    policy.start_from(found.tensors)


def _store(recipe: Recipe, run: RunDir, say: Callable[[str], None]) -> None:
    """Copy the starting adapter into the run directory, unless this run has trained from the copy already."""
    folder, source = run.starting_adapter, Path(recipe.model.adapter)
    if folder.is_dir() and latest_checkpoint(run.checkpoints)[0] is not None:
        say(f"the reference is {folder.name}/, this run's copy of {source}")
        return
    found, text = load_source(source)
    check_adapter(found, recipe.model.lora, str(source))
    shutil.rmtree(folder, ignore_errors=True)  # of a start that came to nothing
    size = sum(tensor.nbytes for tensor in found.tensors.values())
    with new_directory(folder, size) as temporary:
        write_adapter(temporary, found.tensors, recipe.model.lora, recipe.model.path)
    say(f"starting adapter and reference: {text}")


def load_source(source: Path) -> tuple[StoredAdapter, str]:
    """The adapter of an exported directory, of a run directory's newest checkpoint, or of one of its checkpoints.

    Returns it and where it was found.

    Raises ModelError if there is none.
    """
    if (source / ADAPTER_CONFIG).is_file() or (source / ADAPTER_WEIGHTS).is_file():
        return read_adapter(source), str(source)
    run = RunDir(source.parent.parent if (source / MANIFEST).is_file() else source)
    if not run.recipe_file.is_file():
        raise ModelError(f"{_FIELD} = {source} is neither a run directory (recipe.toml) nor an adapter ({ADAPTER_CONFIG})")
    recipe = run.recipe()
    if recipe.model.lora is None:
        raise ModelError(
            f"{_FIELD} = {source} trained all parameters and has no adapter; take its weights with model.init_from instead"
        )
    path = find_checkpoint(source, _FIELD)
    trained = open_trained(path, recipe)
    spec = recipe.model.lora
    return StoredAdapter(spec.rank, spec.alpha, sorted(spec.module_names()), trained.read([*trained.stored])), str(path)
