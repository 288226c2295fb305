"""A pool of processes that score responses, each within its time limit.

Not `multiprocessing`'s: its spawned children import the parent's main module (under torchrun that is the
trainer, torch and all), and a pool of it cannot kill one worker. Here a thread hands one task at a time to each
process, kills a process whose task is late, and starts another in its place.
"""

import collections
import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from omnitrain.errors import OmnitrainError, RunError, UsageError

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from omnitrain.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_START_SECONDS = 120.0
# How often busy processes are looked at: one may die while a child of its own holds the pipe open.
_TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """What became of one task."""

    kind: str
    """"ok", "raised", "invalid" (not one finite number), "timeout" or "crashed"."""
    value: float | None
    error: str
    """One line; empty if ok."""
    traceback: str
    seconds: float


@dataclass
class _Task:
    id: Any
    message: bytes
    timeout: float


class _Worker:
    """One process. `task` is what it works on; `deadline` is that task's, or its start's."""

    def __init__(self, pool: "Pool"):
        self.connection, theirs = Pipe()
        arguments = [json.dumps(pool.path), str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=pool.log if pool.keeps_log else subprocess.DEVNULL,
            stderr=pool.log,
            cwd=pool.cwd,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the run, which closes the pool when it is done
        )
        theirs.close()
        self.ready = False
        self.task: _Task | None = None
        self.started = time.monotonic()
        self.deadline = self.started + _START_SECONDS
        self.send(pickle.dumps([fields for _, fields in pool.rewards]))

    def send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            return  # it died; its end of the pipe says so at the next look

    def ended(self) -> bool:
        """Whether the process has ended. Does not reap it: until then its process group's id is its own."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        """Kill it and what it started, and reap it."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself and left nothing behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class Pool:
    """`workers` processes that hold `rewards`: each its place in the recipe ("rewards[0]") and its table's fields.

    `done(task id, outcome)` is called in the pool's thread.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str, dict[str, Any]]],
        workers: int,
        done: Callable[[Any, Outcome], None],
        log: Path | None = None,
    ):
        if workers < 1:
            raise ValueError(f"workers = {workers}; at least one is needed")
        self.rewards = list(rewards)
        self.path, self.cwd = list(sys.path), os.getcwd()
        self.keeps_log = log is not None
        self.log = open(log, "ab+") if log else tempfile.TemporaryFile()
        self.fatal: OmnitrainError | None = None
        """Why the pool ended by itself; no task will be done any more."""
        self._done = done
        self._size = workers
        self._workers: list[_Worker] = []
        self._queue: collections.deque[_Task] = collections.deque()
        self._lock = threading.Lock()
        self._closing = False
        self._cancelled = False
        self._started = threading.Event()
        self._wake_out, self._wake_in = Pipe(duplex=False)
        # The thread that starts a process must outlive it: the kernel's parent-death signal goes by thread.
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def wait_ready(self) -> None:
        """Wait until a process has loaded every reward. Raises UsageError if one cannot be loaded."""
        self._started.wait()
        if self.fatal:
            raise self.fatal

    def put(self, task_id: Any, message: bytes, timeout: float) -> None:
        """Queue a pickled (index in `rewards`, response, row); its `timeout` in seconds runs from when a process has it."""
        with self._lock:
            self._queue.append(_Task(task_id, message, timeout))
        self._wake()

    def cancel(self) -> None:
        """Forget what is queued, and kill what runs; `done` is not called for either."""
        with self._lock:
            self._queue.clear()
            self._cancelled = True
        self._wake()

    def close(self) -> None:
        """End every process now. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()
        self.log.close()

    def _wake(self) -> None:
        self._wake_in.send_bytes(b"")

    # The thread.

    def _run(self) -> None:
        try:
            self._workers = [_Worker(self) for _ in range(self._size)]
            while not self._closing and self.fatal is None:
                self._step()
        except Exception as error:  # the thread's end must reach whoever waits for it
            self.fatal = RunError(f"the reward pool failed: {type(error).__name__}: {error}")
            self.fatal.__cause__ = error
        for worker in self._workers:
            worker.kill()
        self._started.set()
        if self.fatal:
            self._done(None, Outcome("crashed", None, str(self.fatal), "", 0.0))

    def _step(self) -> None:
        self._assign()
        waiting = [w.deadline for w in self._workers if w.task or not w.ready]
        timeout = min(_TICK_SECONDS, max(0.0, min(waiting) - time.monotonic())) if waiting else None
        by_connection: dict[Connection, _Worker] = {w.connection: w for w in self._workers}
        for connection in wait([self._wake_out, *by_connection], timeout):
            if connection is self._wake_out:
                self._wake_out.recv_bytes()
            else:
                self._receive(by_connection[connection])
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline < now and (worker.task or not worker.ready):
                self._late(worker)
            elif worker.task and not worker.connection.poll() and worker.ended():
                self._dead(worker)

    def _assign(self) -> None:
        with self._lock:
            if self._cancelled:
                self._cancelled = False
                for worker in [w for w in self._workers if w.task]:
                    self._replace(worker)
            for worker in self._workers:
                if worker.ready and worker.task is None and self._queue:
                    worker.task = self._queue.popleft()
                    worker.started = time.monotonic()
                    worker.deadline = worker.started + worker.task.timeout
                    worker.send(worker.task.message)

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._dead(worker)
            return
        if message[0] == "ready":
            worker.ready = True
            self._started.set()
        elif message[0] == "broken":
            self.fatal = self._load_error(*message[1:])
        else:
            kind, result, traceback, seconds = message
            ok = kind == "ok"
            self._finish(worker, Outcome(kind, result if ok else None, "" if ok else result, traceback, seconds))

    def _finish(self, worker: _Worker, outcome: Outcome) -> None:
        task, worker.task = worker.task, None
        self._done(task.id, outcome)

    def _load_error(self, index: int, line: str, traceback: str) -> UsageError:
        place, fields = self.rewards[index]
        name = "function" if "function" in fields else "kind"
        field = f'{place}.{name} = "{fields[name]}"'
        ours = re.match(r"ImportError: (no module named|.* has no )|TypeError: .* not a function$", line)
        hint = "" if ours else f"\n{traceback.rstrip()}"
        return UsageError(f"{field} cannot be loaded: {line}{hint}")

    def _late(self, worker: _Worker) -> None:
        if not worker.ready:
            self.fatal = RunError(f"a reward process did not start in {_START_SECONDS:.0f} s{self._log_tail()}")
            return
        seconds = time.monotonic() - worker.started
        error = f"took longer than its limit of {worker.task.timeout:g} s; its process was killed"
        self._finish(worker, Outcome("timeout", None, error, "", seconds))
        self._replace(worker)

    def _dead(self, worker: _Worker) -> None:
        worker.kill()
        code = worker.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if not worker.ready:
            self.fatal = RunError(f"a reward process {how} while it started{self._log_tail()}")
            return
        if worker.task:
            error = f"its process {how}{self._log_tail()}"
            self._finish(worker, Outcome("crashed", None, error, "", time.monotonic() - worker.started))
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self)

    def _log_tail(self) -> str:
        """The last lines the processes wrote, to say why one ended."""
        size = os.fstat(self.log.fileno()).st_size
        # pread: the processes share this file's position.
        text = os.pread(self.log.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()
        lines = [line for line in text.splitlines() if not line.startswith("omnitrain: ")]  # the scorer's own notes
        return "".join(f"\n  {line}" for line in ["it wrote:", *lines[-12:]]) if lines else ""
