"""The launcher, torchrun and two ranks without a model: how a run ends, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnitrain.errors import UsageError
from omnitrain.keeper import descendants
from omnitrain.rundir import RunDir

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


class Launch:
    """A launcher started on a plan, with the pids of everything below it."""

    def __init__(self, path: Path, plan: str, ranks: int = 2) -> None:
        self.run = RunDir(path)
        self.run.logs.mkdir(parents=True)
        (path / "plan").write_text(plan)
        self.ranks = ranks
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.workers.launcher", str(path), str(ranks)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def started(self) -> dict[str, int]:
        """Wait for all ranks; pids by name."""
        files = [self.run.path / f"pids_{rank}" for rank in range(self.ranks)]
        _wait(lambda: all(file.exists() and len(file.read_text().split()) == 3 for file in files), 60)
        rank, agent, child = map(int, files[1].read_text().split())
        pids = {"rank": rank, "agent": agent, "child": child, "launcher": self.process.pid}
        pids["keeper"] = int(Path(f"/proc/{agent}/stat").read_text().rsplit(")", 1)[1].split()[1])
        self.everything = [self.process.pid, *descendants(self.process.pid)]
        assert set(pids.values()) <= set(self.everything)
        return pids

    def end(self, seconds: float = 30) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def nothing_left(self, seconds: float = 10) -> None:
        _wait(lambda: not [pid for pid in self.everything if _alive(pid)], seconds)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    launches = []

    def start(plan: str, ranks: int = 2) -> Launch:
        launches.append(Launch(tmp_path / "run", plan, ranks))
        return launches[-1]

    yield start
    for launch in launches:
        if launch.process.poll() is None:
            launch.process.terminate()
            launch.process.terminate()
            launch.process.kill()


def test_a_finished_run_ends_with_0_and_its_rank_0_on_the_console(start):
    launch = start("finish")
    launch.started()
    code, out, err = launch.end()
    assert (code, err) == (0, "")
    assert "hello from rank 0" in out and "rank 1" not in out
    assert "hello from rank 1" in (launch.run.logs / "rank_1.log").read_text()
    launch.nothing_left()


def test_a_gate_refused_on_another_rank_ends_with_3_and_is_last_on_the_screen(start):
    launch = start("gate 1")
    launch.started()
    code, _, err = launch.end()
    assert code == 3
    assert err.splitlines() == ["rank 1: gate G9 refused: the numbers are wrong"]
    launch.nothing_left()


def test_a_bug_ends_with_1_and_its_traceback_once(start):
    launch = start("bug 0")
    launch.started()
    code, _, err = launch.end()
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1] == "ZeroDivisionError: a bug"
    launch.nothing_left()


@pytest.mark.parametrize("victim", ["rank", "agent", "keeper", "launcher"])
def test_kill_9_leaves_nothing_running_and_the_lock_free(start, victim):
    launch = start("wait")
    pids = launch.started()
    with pytest.raises(UsageError, match=f"process {pids['launcher']} "):
        launch.run.lock()
    os.kill(pids[victim], signal.SIGKILL)
    launch.nothing_left()
    code, _, err = launch.end()
    if victim == "launcher":
        assert code == -signal.SIGKILL
    else:
        assert code == 1
    if victim == "rank":
        assert "rank 1 was killed by SIGKILL" in err.splitlines()[-1]
    assert launch.run.lock()


def test_ctrl_c_reaches_only_the_launcher_and_ends_with_130_after_the_step(start):
    launch = start("wait")
    launch.started()
    os.killpg(launch.process.pid, signal.SIGINT)
    code, _, err = launch.end()
    assert code == 130
    assert (launch.run.path / "seen").read_text() == "step"
    assert "Ctrl-C again stops at once" in err and err.splitlines()[-1] == "stopped at the next step"
    launch.nothing_left()


def test_sigterm_stops_at_the_next_update_edge(start):
    launch = start("wait")
    launch.started()
    launch.process.terminate()
    assert launch.end()[0] == 130
    assert (launch.run.path / "seen").read_text() == "update"


def test_a_second_ctrl_c_stops_at_once_what_does_not_listen(start):
    launch = start("deaf")
    launch.started()
    launch.process.send_signal(signal.SIGINT)
    _wait((launch.run.path / "seen").exists, 10)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end(10)[0] == 130
    launch.nothing_left(3)


def test_a_crash_in_native_code_names_the_signal(start):
    launch = start("hard")
    launch.started()
    code, _, err = launch.end()
    assert code == 1
    assert "rank 1 was killed by SIGSEGV" in err.splitlines()[-1]
    launch.nothing_left()
