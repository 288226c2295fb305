"""A run in the test's own process, on one rank."""

import json
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def one_rank_run(patch: pytest.MonkeyPatch, recipe: Path, *sets: str, name: str = "run", unsets=()):
    """The parts of `recipe`'s run, ready to train; its directory lies beside the recipe and is resumed if it is there."""
    import torch.distributed as dist

    from omnitrain.recipe.loader import load, resolved
    from omnitrain.rundir import RunDir
    from omnitrain.train.setup import Run

    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for variable, value in place.items():
        patch.setenv(variable, value)
    patch.syspath_prepend(str(recipe.parent))
    directory = RunDir(recipe.parent / name)
    directory.prepare(resolved(load([recipe], sets, unsets).recipe))
    try:
        with Run(directory) as run:
            yield run
    finally:
        directory.unlock()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="session")
def brief_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model, but one token in six ends its answer: it would talk up to any limit otherwise."""
    path = shutil.copytree(tiny_model, tmp_path_factory.mktemp("brief") / "model")
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": list(range(0, 2048, 6))}))
    return path


@pytest.fixture
def one_rank(monkeypatch):
    """one_rank(recipe file, *overrides, name="run", unsets=()) -> a context manager that gives the run."""
    return lambda *args, **options: one_rank_run(monkeypatch, *args, **options)
