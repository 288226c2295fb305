"""One rank of a run: `python -m omnitrain.train.worker RUNDIR`, started by torchrun."""

import sys
from pathlib import Path

from omnitrain.launch import run_rank
from omnitrain.rundir import RunDir


def train(run: RunDir) -> int:
    """Build what the recipe names, pass the gates, train. Every exception is run_rank's to report."""
    from omnitrain.train.setup import Run

    with Run(run) as prepared:
        prepared.train()
    return 0


def main(path: Path) -> int:
    """Run this rank to its end; returns the exit code."""
    return run_rank(RunDir(path), train)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
