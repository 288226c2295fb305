"""One server that scores: requests with a key, repeated after a fault that may pass, and errors fit for a user."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import itertools
import json
import os
import random
import ssl
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from omnitrain.errors import UsageError

if TYPE_CHECKING:
    import httpx

RETRIED = (408, 429)
"""Statuses that may pass, besides 5xx."""
LONGEST_REPLY = 4 << 20
"""Bytes; a score is short."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 20.0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class EndpointError(Exception):
    """The server could not be used. One line: method, URL, status and the first line of its answer.

    `status` is that of its last answer, None without one. See `Endpoint.clean` for the key.
    """

    def __init__(self, line: str, status: int | None = None):
        super().__init__(line)
        self.status = status


class NotOneNumber(Exception):
    """The server's answer holds no score, or not one. One line."""


class Deadline(Exception):
    """A sample's time is up. One line on what it waited for."""


class _Fault(Exception):
    """Why one attempt failed."""

    def __init__(self, text: str, status: int | None = None, *, may_pass: bool = False, wait: float | None = None):
        super().__init__(text)
        self.status, self.may_pass, self.wait = status, may_pass, wait


class Endpoint:
    """A client of `url` with the settings of a `[[rewards]]` table. Use it within one event loop, and close it.

    Raises UsageError, naming the field under `place`, when the key's environment variable is not set.
    """

    def __init__(self, spec: Any, place: str):
        import httpx

        self.place, self.url, self.retries = place, spec.url, spec.retries
        self._key = _key(spec, place)
        self._key_env = spec.api_key_env
        # Not `random` itself: the run's own draws must not depend on a server's mood.
        self._random = random.Random()
        self._client = httpx.AsyncClient(
            timeout=None,  # the sample's deadline ends everything
            # Without TLS, reading the certificates takes a while for nothing.
            verify=urlsplit(spec.url).scheme == "https",
            limits=httpx.Limits(max_connections=spec.concurrency, max_keepalive_connections=spec.concurrency),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            mounts={f"all://{host}": None for host in _LOOPBACK},  # no proxy for this machine's own ports
        )

    async def close(self) -> None:
        """Close its connections, without waiting for a server's part of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._client.aclose()

    def path(self, path: str) -> str:
        """The URL of a path of the same server."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{path}"

    async def request(
        self,
        method: str,
        url: str,
        deadline: float,
        *,
        body: Any = None,
        attachments: list[tuple[str, bytes]] | None = None,
        retries: int | None = None,
        first_wait: float = _FIRST_WAIT,
    ) -> Any:
        """The answer of a request, as parsed JSON; None if it is empty or no JSON and `body` is None.

        body: sent as JSON. With `attachments` (list of (media type, bytes)) the request is multipart/form-data with the
            JSON in the part "sample" and the attachments in order in parts "media".
        deadline: time.monotonic() after which no further attempt is waited for.

        Raises EndpointError for any other answer than 2xx, after `retries` repeated attempts if it may pass.
        """
        retries = self.retries if retries is None else retries
        for attempt in itertools.count(1):
            try:
                return await self._attempt(method, url, deadline, body, attachments or [])
            except _Fault as fault:
                line = f"{method} {url}: {fault}" + (f" ({attempt} attempts)" if attempt > 1 else "")
                wait = self._backoff(attempt, first_wait) if fault.wait is None else fault.wait
                if fault.may_pass and time.monotonic() + wait >= deadline:
                    line += "; no time is left for another attempt"
                elif fault.may_pass and attempt <= retries:
                    await asyncio.sleep(wait)
                    continue
                raise EndpointError(line, fault.status) from None

    async def _attempt(
        self, method: str, url: str, deadline: float, body: Any, attachments: list[tuple[str, bytes]]
    ) -> Any:
        """One request; raises _Fault or Deadline."""
        import httpx

        content: dict[str, Any] = {}
        if attachments:
            names = [f"{index}.{kind.partition('/')[2]}" for index, (kind, _) in enumerate(attachments)]
            media = [("media", (name, data, kind)) for name, (kind, data) in zip(names, attachments)]
            content["files"] = [("sample", ("sample.json", json.dumps(body).encode(), "application/json")), *media]
        elif body is not None:
            content["json"] = body
        left = max(0.0, deadline - time.monotonic())
        received = bytearray()
        try:
            async with asyncio.timeout(left), self._client.stream(method, url, **content) as response:
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > LONGEST_REPLY:
                        break
        except TimeoutError:
            raise Deadline(f"{method} {url}: no whole answer in the {left:.3g} s that were left") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Fault(
                _why(error), may_pass=isinstance(error, (httpx.TransportError, httpx.DecodingError))
            ) from error
        return self._parse(response, received, body is not None)

    def _parse(self, response: "httpx.Response", received: bytearray, must_be_json: bool) -> Any:
        code, text = response.status_code, received.decode(errors="replace")
        status = f"{code} {response.reason_phrase}".strip()
        if response.is_success:
            if len(received) > LONGEST_REPLY:
                raise _Fault(f"{status}: a reply of more than {LONGEST_REPLY >> 20} MiB", code)
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                if must_be_json:
                    raise _Fault(f"{status}, but no JSON: {_first_line(self.clean(text))}", code) from None
                return None
        said = f"{status}: {_first_line(self.clean(text))}"
        if code in (401, 403):
            said += f"; check the key in {self._key_env}" if self._key else f"; set {self.place}.api_key_env"
        elif response.is_redirect:
            said += f"; it redirects to {response.headers.get('location')}"
        may_pass = code in RETRIED or code >= 500
        raise _Fault(said, code, may_pass=may_pass, wait=_retry_after(response.headers.get("retry-after")))

    def _backoff(self, attempt: int, first_wait: float) -> float:
        """Seconds before attempt + 1: doubling, and jittered so that samples do not come back all at once."""
        return min(_LONGEST_WAIT, first_wait * 2 ** (attempt - 1)) * self._random.uniform(0.5, 1.0)

    def clean(self, text: str) -> str:
        """The text without the key, which a server may have sent back. To be called before a text is cut."""
        return text.replace(self._key, "***") if self._key else text


def _key(spec: Any, place: str) -> str | None:
    if spec.api_key_env is None:
        return None
    key = os.environ.get(spec.api_key_env, "").strip()
    field = f'{place}.api_key_env = "{spec.api_key_env}"'
    if not key:
        raise UsageError(f"{field}: this environment variable is not set; export it where the run starts")
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"{field}: its value is no key: it holds characters that a header cannot carry")
    return key


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    if not lines:
        return "an empty body"
    line = "".join(c if c.isprintable() else "\ufffd" for c in lines[0].strip())
    return line if len(line) <= 200 else line[:200] + "..."


def _why(error: BaseException) -> str:
    """What the operating system said, where it said something; httpx has its own words around it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup):  # one for each address of the host
            seen = seen.exceptions[0]
        if isinstance(seen, OSError) and seen.strerror:
            # asyncio puts words of its own into strerror; resolvers and TLS have numbers of their own.
            known = seen.errno in errno.errorcode and not isinstance(seen, ssl.SSLError)
            return (os.strerror(seen.errno) if known else seen.strerror).lower()
        seen = seen.__cause__ or seen.__context__
    return _first_line(str(error)) if str(error) else type(error).__name__


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or a date; None if it holds neither."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
