"""Starts a run's ranks under torchrun, passes the user's stop on, and says how it ended. Imports no torch.

    launcher (the terminal's) -> keeper (own session, adopts orphans) -> agent (torchrun) -> ranks -> their children

The ranks never see the terminal's Ctrl-C: the launcher writes the run directory's stop file, which rank 0 reads.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnitrain import keeper
from omnitrain.errors import Interrupted, OmnitrainError, environment_fault
from omnitrain.rundir import RunDir, read_exit, request_stop, write_atomic, write_exit

LAUNCHED = "OMNITRAIN_LAUNCHED"
AGENT = "OMNITRAIN_AGENT_PID"
TRACEBACK = "OMNITRAIN_TRACEBACK"
"""Set by --traceback, for the command line and the ranks."""

GRACE_SECONDS = 5  # between torchrun's SIGTERM and SIGKILL to the other ranks once one has failed

# Signals that end a process from outside or by its own broken memory: the cause, never the echo of another rank's end.
_DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Accelerators:
    """What this machine offers to a run."""

    kind: str
    """ "cuda", "npu" or "cpu"."""

    count: int
    """Processes to start: one per accelerator, one on a CPU."""


def visible_accelerators() -> Accelerators:
    """Count accelerators from the environment and the device files, in milliseconds."""
    for kind, variable, pattern in (
        ("cuda", "CUDA_VISIBLE_DEVICES", r"nvidia\d+"),
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", r"davinci\d+"),
    ):
        present = sum(1 for name in os.listdir("/dev") if re.fullmatch(pattern, name))
        if not present and kind == "cuda" and shutil.which("nvidia-smi"):  # WSL has no device files
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
            present = listing.stdout.count("GPU ") if listing.returncode == 0 else 0
        if not present:
            continue
        visible = os.environ.get(variable)
        if visible is not None:
            named = [entry.strip() for entry in visible.split(",") if entry.strip()]
            present = len(named) if "-1" not in named else 0
        if present:
            return Accelerators(kind, present)
    return Accelerators("cpu", 1)


# What libraries read once, at their start: cuBLAS its workspace, the collectives of Ascend, Python the order of sets.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HCCL_DETERMINISTIC": "true", "PYTHONHASHSEED": "0"}


def environment(kind: str, deterministic: bool = False) -> dict[str, str]:
    """Variables that ranks need before they import torch or vllm; ours to set, never the user's."""
    from omnitrain.rollout import vllm_compat

    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | vllm_compat.environment()
    if kind == "cpu":
        variables |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables | (_DETERMINISTIC if deterministic else {})


def launch(
    run: RunDir,
    devices: int,
    torchrun_args: Sequence[str] = (),
    *,
    kind: str = "cpu",
    module: str = "omnitrain.train.worker",
    deterministic: bool = False,
) -> int:
    """Run `module` on `devices` ranks in a prepared run directory and wait. Returns the command's exit code.

    `torchrun_args` are passed on (several nodes, another rendezvous); without a rendezvous of theirs it is --standalone.
    `deterministic`: the recipe's; some libraries read it from the environment when they are loaded.
    Ctrl-C finishes the step, saves and ends with 130; a second one stops at once. SIGTERM saves at the next update edge.
    On failure the error of the rank that failed first is the last thing on the screen.
    """
    command = [
        *(sys.executable, "-m", "omnitrain.keeper", str(os.getpid())),
        *(sys.executable, "-m", "omnitrain.agent", str(run.logs)),
        *_rendezvous(torchrun_args),
        *("--nproc-per-node", str(devices), "--max-restarts", "0", "--monitor-interval", "0.1"),
        *torchrun_args,
        *("-m", module, str(run.path)),
    ]
    variables = os.environ | environment(kind, deterministic)
    variables |= {LAUNCHED: "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS), "PYTHONUNBUFFERED": "1"}
    # The keeper inherits the lock: no other run gets in before the last of this run's processes is gone.
    inherited = [] if run.lock_descriptor is None else [run.lock_descriptor]
    start = time.time()
    stopper = _Stopper(run)
    keeper.adopt_orphans()  # for the case that the keeper is killed
    others = set(keeper.descendants(os.getpid()))
    process = subprocess.Popen(command, env=variables, start_new_session=True, pass_fds=inherited)
    try:
        with stopper.watching(process):
            status = process.wait()
    finally:
        process.kill()  # ended long ago, unless an exception brought us here
        process.wait()
        keeper.kill_below(others)
    if stopper.at_once:
        print("\nstopped at once; the last checkpoint is what is kept", file=sys.stderr)
        return Interrupted.exit_code
    code, message = outcome(run, status, start)
    if message:
        report(message, code)
    return code


def report(message: str, code: int) -> None:
    """Print an error on stderr, red on a terminal; an interruption is no error and stays plain."""
    red = code != Interrupted.exit_code and sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[31m{message}\x1b[0m" if red else message, file=sys.stderr, flush=True)


def _rendezvous(arguments: Sequence[str]) -> list[str]:
    """What torchrun needs beside the user's arguments to bring the ranks together."""

    def given(*names: str) -> bool:
        return any(argument.replace("_", "-").startswith(names) for argument in arguments)

    if not given("--standalone", "--nnodes", "--rdzv", "--master", "--node-rank"):
        return ["--standalone"]
    # torchrun's default backend, "static", wants a --node-rank of each node.
    return ["--rdzv-backend", "c10d"] if given("--rdzv-endpoint") and not given("--rdzv-backend", "--node-rank") else []


class _Stopper:
    """Turns the launcher's signals into the run directory's stop file, and the second Ctrl-C into an end."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._process: subprocess.Popen | None = None
        self._interrupts = 0
        self.at_once = False

    def watching(self, process: subprocess.Popen) -> "_Stopper":
        self._process = process
        return self

    def __enter__(self) -> "_Stopper":
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            signals.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in signals}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame) -> None:
        if signum != signal.SIGINT:
            self._say("saving at the next update edge, then stopping")
            request_stop(self._run, "update")
            return
        self._interrupts += 1
        if self._interrupts == 1:
            self._say("finishing this step, saving, then stopping; Ctrl-C again stops at once")
            if not self._run.stop_file.exists():  # a SIGTERM before asks for more haste than this
                request_stop(self._run, "step")
        else:
            self.at_once = True
            self._process.terminate()  # the keeper kills all below it

    @staticmethod
    def _say(text: str) -> None:
        # os.write: a handler may interrupt a print, and print's buffer cannot be entered twice.
        os.write(2, f"\n{text}\n".encode())


# ---- how it ended


def outcome(run: RunDir, status: int, start: float = 0.0) -> tuple[int, str]:
    """(exit code, what to print) from rank 0's exit.json, the ranks' error files and torchrun's exit status."""
    written = read_exit(run)
    if status == 0 and written:
        return written
    first = _first_failure(run, start)
    if first:
        return first
    if status == 0:
        return 1, f"the ranks ended without a word of how; see {run.logs}"
    if written and written[0] == 0:
        return 1, f"the run was finished and saved, but a process ended badly after it; see {run.logs}"
    if written:
        return written
    return 1, f"torchrun ended with status {status} before any rank could report; see {run.logs / 'torchrun.log'}"


def _first_failure(run: RunDir, start: float) -> tuple[int, str] | None:
    errors = {}
    for path in run.logs.glob("rank_*.error"):
        head, _, text = path.read_text().partition("\n")
        rank, when, code = head.split()
        if float(when) >= start:
            errors[int(rank)] = (float(when), int(code), text.strip())
    ended = []
    if (run.logs / "failures.json").exists():
        try:
            ended = sorted(json.loads((run.logs / "failures.json").read_text()), key=lambda failure: failure["time"])
        except ValueError:  # cut short by a full disk
            ended = []
    # A killed rank cannot write; what the others then write is only that it is gone.
    for failure in ended:
        if -failure["exitcode"] in _DEADLY and failure["rank"] not in errors:
            name = signal.Signals(-failure["exitcode"]).name
            hint = " (out of memory? see dmesg)" if name == "SIGKILL" else ""
            return 1, f"rank {failure['rank']} was killed by {name}{hint}; see {_log(run, failure['rank'])}"
    if errors:
        rank, (_, code, text) = min(errors.items(), key=lambda item: item[1])
        return code, text if len(errors) == 1 and rank == 0 else f"rank {rank}: {text}"
    for failure in ended:
        if failure["exitcode"] != -signal.SIGTERM:  # torchrun's own, to the ranks that had not failed
            return (
                1,
                f"rank {failure['rank']} ended with status {failure['exitcode']}; see {_log(run, failure['rank'])}",
            )
    return None


def _log(run: RunDir, rank: int) -> str:
    path = run.logs / f"rank_{rank}.log"
    return str(path) if path.exists() else "its output above"


# ---- inside a rank


def die_with_parent() -> None:
    """Tie this rank to torchrun's agent: when it dies, so does the rank. Call it first of all, before importing torch."""
    agent = os.environ.get(AGENT)
    keeper.die_with_parent(int(agent) if agent else None)


def run_rank(run: RunDir, body: Callable[[RunDir], int | None]) -> int:
    """The frame around a rank's work: output, parent, errors, exit code. Call it from the worker's `__main__` part.

    Rank 0 keeps the console, the others write logs/rank_N.log. An exception is written to logs/rank_N.error, and by rank 0
    to exit.json; OmnitrainErrors as their message alone. After an error the process ends at once, because collectives'
    and engines' own ends may wait for ranks that are gone.
    """
    rank = int(os.environ.get("RANK", 0))
    die_with_parent()
    if outer_torchrun():
        # Its agent passes on what the user or the batch system sends, to all ranks; rank 0 answers for them.
        for number, when in ((signal.SIGINT, "step"), (signal.SIGTERM, "update")):
            signal.signal(number, lambda *_, when=when: request_stop(run, when) if rank == 0 else None)
    run.logs.mkdir(exist_ok=True)
    if rank:
        _redirect(run.logs / f"rank_{rank}.log")
    try:
        code = body(run) or 0
    except BaseException as error:
        code, message = describe(error)
        if isinstance(error, Interrupted):
            _flush()
        else:
            traceback.print_exc() if rank else None  # rank 0's appears once, last on the screen
            _leave_error(run, rank, code, message)
            _flush()
            os._exit(code)
    else:
        message = ""
    if rank == 0:
        write_exit(run, code, message)
    # To torchrun any status but 0 is a failure, for which it kills the other ranks.
    return 0 if code == Interrupted.exit_code else code


def _leave_error(run: RunDir, rank: int, code: int, message: str) -> None:
    """Write how this rank ended where the launcher looks for it."""
    try:
        write_atomic(run.logs / f"rank_{rank}.error", f"{rank} {time.time()} {code}\n{message}\n")
        if rank == 0:
            write_exit(run, code, message)
    except OSError as error:  # a full disk may be why it ended
        print(f"rank {rank}: {message}\n({error}; so this could not be kept in {run.logs})", file=sys.stderr)


def describe(error: BaseException) -> tuple[int, str]:
    """(exit code, text): the message alone for an error that a user can act on, else the traceback."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code, f"ended by SystemExit({error.code!r})"
    if isinstance(error, OmnitrainError):
        if os.environ.get(TRACEBACK):
            return error.exit_code, "".join(traceback.format_exception(error))
        return error.exit_code, str(error)
    code = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
    if (fault := environment_fault(error)) and not os.environ.get(TRACEBACK):
        return code, fault
    return code, "".join(traceback.format_exception(error))


def _redirect(path: Path) -> None:
    _flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


# ---- inside an outer torchrun


def outer_torchrun() -> bool:
    """Whether this process was started by a torchrun that is not ours."""
    return "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHED not in os.environ


def outer_token() -> str:
    """A name that all ranks of the outer torchrun share."""
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return " ".join(os.environ.get(name, "") for name in parts)


def nodes_token(torchrun_args: Sequence[str]) -> str | None:
    """A name that the launchers on all nodes share, from their rendezvous; None on a single node."""
    words = [word for argument in torchrun_args for word in argument.replace("_", "-").split("=", 1)]
    shared = [
        f"{word} {value}"
        for word, value in zip(words, words[1:])
        if word in ("--rdzv-endpoint", "--rdzv-id", "--master-addr", "--master-port")
    ]
    return " ".join(shared) or None
