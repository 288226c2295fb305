"""What a reward process runs: load the functions, then score one response after the other.

Started by pool.py with a pipe. It imports neither torch nor vllm (a user's own function may), takes no signal
from the terminal, and dies with its parent however that one ends.
"""

import contextlib
import ctypes
import faulthandler
import numbers
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from math import isfinite
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from omnitrain.rewards import load_reward

_PR_SET_PDEATHSIG = 1
# Fits a socket's buffer, so that sending it never waits for the reader.
_LONGEST_TEXT = 8000


def one_number(value: Any) -> float:
    """The reward as a float. Raises ValueError for None, NaN, infinity, text, and anything with a length."""
    if isinstance(value, numbers.Real) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0):
        number = float(value)
        if isfinite(number):
            return number
        raise ValueError(f"returned {number}, not a finite number")
    if hasattr(value, "__len__") and not isinstance(value, str):
        raise ValueError(f"returned a {type(value).__name__} of {len(value)} for one response, not one number")
    raise ValueError(f"returned {value!r:.80}, not a number")


def _describe(error: BaseException) -> tuple[str, str]:
    """One line, and the traceback without this file's own frame."""
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
    tail = error.__traceback__.tb_next if error.__traceback__ else None
    return line, "".join(traceback.format_exception(type(error), error, tail))[-_LONGEST_TEXT:]


def _inference_mode() -> contextlib.AbstractContextManager:
    """No gradients for a function that uses torch, which this process imports only if the function did."""
    torch = sys.modules.get("torch")
    return torch.inference_mode() if torch else contextlib.nullcontext()


def _score(functions: list[Callable], message: bytes) -> tuple:
    """(kind, value or error line, traceback, seconds)."""
    start = time.perf_counter()
    try:
        index, response, row = pickle.loads(message)
        with _inference_mode():
            value = functions[index](response, row)
    # A reward may call sys.exit(); that too is a failure of its sample and not the end of the process.
    except BaseException as error:
        return ("raised", *_describe(error), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    try:
        return ("ok", one_number(value), "", seconds)
    except ValueError as error:
        return ("invalid", str(error), "", seconds)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also by SIGKILL. Linux only; elsewhere the pipe's
    end is noticed after the current response."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(pipe: int, parent: int) -> None:
    """Serve the pipe until it closes. First message: each reward's fields; then (index, response, row)."""
    _die_with(parent)
    faulthandler.enable()
    connection = Connection(pipe)
    functions = []
    for index, fields in enumerate(connection.recv()):
        try:
            functions.append(load_reward(SimpleNamespace(**fields)))
        except BaseException as error:
            connection.send(("broken", index, *_describe(error)))
            return
    connection.send(("ready",))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        connection.send(_score(functions, message))
