"""Leaves no process behind: ties a run's processes to their parents, and kills what outlives them.

A rank may start children of its own (data workers, reward workers, engine processes) that know nothing of us. So the
launcher does not start torchrun directly but `python -m omnitrain.keeper LAUNCHER_PID COMMAND...`: the keeper adopts every
orphan below it (PR_SET_CHILD_SUBREAPER), and when the command ends or the launcher dies it kills them all. If the keeper
itself is killed, torchrun and the ranks die with their parents, and the launcher adopts and kills the rest.
Linux only: elsewhere torchrun alone looks after the ranks. Imports nothing but the standard library.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int | None = None, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends.

    `parent` is the pid that should be the parent: if it died before this call, the process ends at once. Without it
    the present parent counts.
    """
    before = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != before:
        os._exit(128 + signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Pids below `root`, nearest first. Reads /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        # The name, in parentheses, may hold anything; state and parent follow the last one.
        children.setdefault(int(stat[stat.rindex(")") + 2 :].split()[1]), []).append(pid)
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if sys.platform == "linux" else []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended meanwhile: that is what we wanted


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_below(spare: set[int] = frozenset(), seconds: float = 10.0) -> None:
    """SIGKILL and reap everything below this process but `spare`, until nothing is left or the time is over."""
    deadline = time.monotonic() + seconds
    while (pids := [pid for pid in descendants(os.getpid()) if pid not in spare]) and time.monotonic() < deadline:
        for pid in pids:
            _kill(pid)
        for pid in pids:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass  # another process's child: adopted, and reaped, in a later round
        time.sleep(0.02)


def keep(launcher: int, command: list[str]) -> int:
    """Run `command` until it ends or the launcher dies; then kill everything below. Returns its exit status."""

    def stop(signum, frame):
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        adopt_orphans()
        die_with_parent(launcher, signal.SIGTERM)
        keeper = os.getpid()
        process = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(keeper))
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_below()


if __name__ == "__main__":
    status = keep(int(sys.argv[1]), sys.argv[2:])
    sys.exit(status if status >= 0 else 128 - status)
