"""A rank without a model: writes its pid, starts a child that knows nothing of us, and does as the run's `plan` file says."""

import faulthandler
import os
import subprocess
import sys
import time
from pathlib import Path

from omnitrain.errors import GateRefused, Interrupted
from omnitrain.launch import run_rank
from omnitrain.rundir import RunDir, stop_requested


def work(run: RunDir) -> int:
    rank = int(os.environ["RANK"])
    plan = (run.path / "plan").read_text().split()
    # `env -i`: no variables of ours; a session of its own: only adoption by the keeper can find it.
    child = subprocess.Popen(
        ["env", "-i", sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    print(f"hello from rank {rank}", flush=True)
    (run.path / f"pids_{rank}").write_text(f"{os.getpid()} {os.getppid()} {child.pid}")
    time.sleep(1.0)  # the test looks at the processes
    if plan == ["gate", str(rank)]:
        raise GateRefused("gate G9 refused: the numbers are wrong")
    if plan == ["bug", str(rank)]:
        raise ZeroDivisionError("a bug")
    if plan == ["finish"]:
        return 0
    if plan == ["hard"]:
        if rank:
            faulthandler._sigsegv()
        time.sleep(60)
    for _ in range(6000):
        if rank == 0 and (when := stop_requested(run)):
            (run.path / "seen").write_text(when)
            if plan != ["deaf"]:
                child.kill()
                raise Interrupted(f"stopped at the next {when}")
        if rank and (run.path / "seen").exists() and plan != ["deaf"]:
            raise Interrupted("stopped")
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    directory = RunDir(Path(sys.argv[1]))
    sys.exit(run_rank(directory, work))
