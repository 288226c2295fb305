"""What a check is and how checks run. Imports nothing heavy: a broken torch must not break the doctor."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

# The last line of a traceback: the exception's name at the line's beginning.
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Refused|Exit): ")

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: str
    """"ok", "warning" (it will run, but look) or "problem" (it will not)."""
    detail: str
    fix: str | None = None
    """One line to paste into a shell or a recipe."""

    def __post_init__(self) -> None:
        assert self.status in (OK, WARNING, PROBLEM), self.status
        assert self.status == OK or self.fix, f"{self.name}: a {self.status} without a fix"

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """A named function that finds something, possibly several things. It may take seconds; it changes nothing."""

    name: str
    run: Callable[[], Finding | list[Finding]]


def run_checks(checks: list[Check], workers: int | None = None) -> Iterator[Finding]:
    """Run the checks side by side and yield their findings in the order of `checks`, as soon as they are known.

    A check that raises becomes a finding: the doctor reports what is broken, its own parts included.
    """
    workers = workers or max(2, min(8, os.cpu_count() or 2))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="doctor")
    try:
        for future in [pool.submit(_guarded, check) for check in checks]:
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _guarded(check: Check) -> list[Finding]:
    try:
        found = check.run()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        detail = f"the check failed at {where}: {type(error).__name__}: {first_line(str(error))}"
        return [Finding(check.name, PROBLEM, detail, "make install")]
    return found if isinstance(found, list) else [found]


@dataclass(frozen=True)
class Outcome:
    """How a child process ended."""

    code: int
    """Exit code; -9 and the like for a signal; 124 when it ran out of time."""
    out: str
    err: str

    def reason(self) -> str:
        """The line that says why it failed: the exception, or how it ended."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        # torchrun's own error says no more than that a rank had one.
        errors = [line for line in lines if _RAISED.match(line) and "ChildFailedError" not in line]
        if errors:
            return first_line(errors[-1])
        ended = "ran out of time" if self.code == 124 else f"ended with code {self.code}"
        return f"{ended}: {first_line(lines[-1])}" if lines else ended


def run_python(args: list[str], *, timeout: float, env: dict[str, str] | None = None) -> Outcome:
    """Run this interpreter with `args` for at most `timeout` seconds, then kill it with all that it started."""
    child = subprocess.Popen(
        [sys.executable, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout)
        return Outcome(child.returncode, out, err)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return Outcome(124, *child.communicate())
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise


def first_line(text: str, width: int = 160) -> str:
    """The first line that is not empty, cut to `width` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= width else line[: width - 1] + "…"
