"""The launcher as a process of its own: `python -m tests.integration.workers.launcher RUNDIR RANKS`."""

import sys

from omnitrain.launch import launch
from omnitrain.rundir import RunDir

if __name__ == "__main__":
    run = RunDir(sys.argv[1])
    run.lock()
    sys.exit(launch(run, int(sys.argv[2]), module="tests.integration.workers.dummy"))
