"""torchrun, with a failure written to a file instead of a traceback: `python -m omnitrain.agent LOGS TORCHRUN_ARGS...`.

torchrun answers a dead rank with two screens of its own frames, after which nobody finds the rank's error. The launcher
prints that error; this entry keeps torchrun's notes in LOGS/torchrun.log and the ranks' exit codes in LOGS/failures.json.
"""

import json
import logging
import os
import sys
from pathlib import Path

from omnitrain.launch import AGENT


def main(logs: Path, arguments: list[str]) -> int:
    """Run torchrun; returns 0, or 1 after a rank ended badly."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    notes = logging.getLogger("torch.distributed")
    notes.propagate = False
    # The loggers below have handlers of their own, on the screen.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.")]:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    handler = logging.FileHandler(logs / "torchrun.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    notes.handlers = [handler]
    os.environ[AGENT] = str(os.getpid())
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        try:
            (logs / "failures.json").write_text(json.dumps(failures))
        except OSError as unwritten:  # a full disk may be why a rank ended; the launcher does without
            print(f"{logs}: {unwritten}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
