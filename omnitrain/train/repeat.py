"""One rank of `omnitrain bench --determinism`: train, and leave a digest of the weights.

`python -m omnitrain.train.repeat RUNDIR`, started by torchrun like a run's worker. Writes RUNDIR/determinism.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from omnitrain.evaluation.determinism import RESULT
from omnitrain.launch import run_rank
from omnitrain.rundir import RunDir, write_atomic


def repeat(run: RunDir) -> int:
    """Train as the worker does, then digest this rank's part of what was trained. Returns 0."""
    from omnitrain.train.setup import Run

    with Run(run) as prepared:
        prepared.train()
        digests = prepared.ranks.gather(digest(prepared.context.policy.module))
        if prepared.ranks.main:
            write_atomic(run.path / RESULT, json.dumps(digests))
    return 0


def digest(module) -> str:
    """SHA-256 of the bytes of this rank's trained parameters, in the order of the module."""
    import torch

    found = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            found.update(name.encode())
            found.update(local.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def main(path: Path) -> int:
    """Run this rank to its end; returns the exit code."""
    return run_rank(RunDir(path), repeat)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
