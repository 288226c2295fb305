"""The rewards that ask a server, all in one thread: waiting for an answer needs no process.

The counterpart of pool.py, with the same outcomes. An event loop holds up to `concurrency` samples of each reward
under way; a sample whose time is up, or whose run ends, is dropped at once.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from omnitrain.errors import OmnitrainError, RunError
from omnitrain.rewards.http_client import Deadline, Endpoint, EndpointError, NotOneNumber
from omnitrain.rewards.pool import Outcome
from omnitrain.rewards.worker import one_number

START_SECONDS = 8.0
"""For every endpoint's first answer, when a run starts."""
# Beside the requests, which watch the time themselves: for reading media, and for what they missed.
_GRACE_SECONDS = 0.1


def open_reward(place: str, spec: Any) -> tuple[Any, Endpoint]:
    """(the reward, its endpoint) of a table whose kind is one of `ENDPOINTS`. Raises UsageError for a missing key."""
    endpoint = Endpoint(spec, place)
    return importlib.import_module(f"omnitrain.rewards.{spec.kind}").Reward(spec, endpoint), endpoint


async def check(place: str, spec: Any) -> None:
    """Ask whether the endpoint is there and willing. Raises RunError naming the field and the URL, or UsageError."""
    reward, endpoint = open_reward(place, spec)
    try:
        await _check(reward, endpoint, place, spec)
    finally:
        await endpoint.close()


async def _check(reward: Any, endpoint: Endpoint, place: str, spec: Any) -> None:
    try:
        await reward.check(time.monotonic() + START_SECONDS)
    except (EndpointError, Deadline) as error:
        raise RunError(
            f'{place}.url = "{spec.url}" does not work: {endpoint.clean(str(error))}\n'
            "start the server, or correct the table; `omnitrain doctor RECIPE` asks it again"
        ) from None


class EndpointPool:
    """`rewards`: each its place in the recipe ("rewards[0]") and its table. `done(task id, outcome)` is called in the
    pool's thread; a task id of None says that an endpoint does not work and nothing will be done."""

    def __init__(self, rewards: Sequence[tuple[str, Any]], done: Callable[[Any, Outcome], None]):
        self.fatal: OmnitrainError | None = None
        """Why the pool ended by itself; no task will be done any more."""
        self._rewards = list(rewards)
        self._done = done
        self._tasks: set[asyncio.Task] = set()
        self._started = threading.Event()
        self._healthy = asyncio.Event()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        # Only warnings of the client: at INFO it writes a line for each request.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._thread = threading.Thread(target=self._run, name="endpoints", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until every endpoint has answered. Raises RunError or UsageError for one that did not."""
        self._started.wait()
        if self.fatal:
            raise self.fatal

    def put(self, task_id: Any, index: int, response: Any, row: dict, timeout: float) -> None:
        """Queue a response for reward `index`; its `timeout` in seconds runs from when it is under way."""
        self._call(lambda: self._spawn(self._score(task_id, index, response, row, timeout)))

    def cancel(self) -> None:
        """Forget what is queued and under way; `done` is not called for it."""
        self._call(self._cancel_all)

    def close(self) -> None:
        """Drop everything and end. A second call does nothing."""
        self._call(self._closing.set)
        self._thread.join()

    def _call(self, function: Callable[[], Any]) -> None:
        if self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:
                return  # it ended just now

    # The thread.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # the thread's end must reach whoever waits for it
            self._fail(RunError(f"the endpoints' thread failed: {type(error).__name__}: {error}"))
        finally:
            self._started.set()
            self._loop.close()

    async def _main(self) -> None:
        opened: list[tuple[Any, Endpoint]] = []
        checking = None
        try:
            for place, spec in self._rewards:
                opened.append(open_reward(place, spec))
            self._opened = opened
            self._slots = [asyncio.Semaphore(spec.concurrency) for _, spec in self._rewards]
            checking = self._loop.create_task(self._check_all())
        except OmnitrainError as error:
            self._fail(error)
        await self._closing.wait()
        self._cancel_all()
        if checking:
            checking.cancel()
        await asyncio.gather(*self._tasks, *([checking] if checking else []), return_exceptions=True)
        for _, endpoint in opened:
            await endpoint.close()

    async def _check_all(self) -> None:
        checks = [_check(*pair, *table) for pair, table in zip(self._opened, self._rewards)]
        try:
            for error in await asyncio.gather(*checks, return_exceptions=True):
                if error is not None:
                    raise error
        except OmnitrainError as error:
            self._fail(error)
        except Exception as error:
            self._fail(RunError(f"the endpoints cannot be checked: {type(error).__name__}: {error}"))
        else:
            self._healthy.set()
            self._started.set()

    def _fail(self, error: OmnitrainError) -> None:
        self.fatal = error
        self._started.set()
        self._done(None, Outcome("crashed", None, str(error), "", 0.0))

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _score(self, task_id: Any, index: int, response: Any, row: dict, timeout: float) -> None:
        await self._healthy.wait()
        async with self._slots[index]:
            self._done(task_id, await self._outcome(index, response, row, timeout))

    async def _outcome(self, index: int, response: Any, row: dict, timeout: float) -> Outcome:
        reward, endpoint = self._opened[index]
        start = time.monotonic()
        kind, value, error, trace = "ok", None, "", ""
        try:
            async with asyncio.timeout(timeout + _GRACE_SECONDS):
                value = await reward.score(response, row, start + timeout)
            value = _one_number(value)
        except (Deadline, TimeoutError) as late:
            kind, error = "timeout", f"took longer than its limit of {timeout:g} s"
            error += f"; {late}" if str(late) else f" at {endpoint.url}"
        except EndpointError as failed:
            kind, error = "raised", str(failed)
        except NotOneNumber as odd:
            kind, error = "invalid", f"{odd}, from {endpoint.url}"
        except Exception as bug:
            kind, error, trace = "raised", f"{type(bug).__name__}: {bug}", traceback.format_exc()
        value = value if kind == "ok" else None
        return Outcome(kind, value, endpoint.clean(error), endpoint.clean(trace), time.monotonic() - start)


def _one_number(value: Any) -> float:
    try:
        return one_number(value)
    except ValueError as error:
        raise NotOneNumber(str(error)) from None
