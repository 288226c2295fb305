"""A model behind an OpenAI-compatible chat endpoint (a vLLM server, or any), asked until its answer can be read."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeVar

from omnitrain.rewards.http_client import Endpoint, EndpointError

T = TypeVar("T")

# Greedy answers repeat themselves; a further attempt must be able to differ.
_LATER_TEMPERATURE = 0.7
_AUDIO_FORMATS = {"audio/wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac", "audio/ogg": "ogg"}


def media_part(kind: str, data: bytes) -> dict[str, Any]:
    """A content part of a chat message: a picture or a video as a data URL, a sound as input_audio.

    kind: the media type, such as "image/png".
    """
    encoded = base64.b64encode(data).decode()
    if kind in _AUDIO_FORMATS:
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": _AUDIO_FORMATS[kind]}}
    name = f"{kind.partition('/')[0]}_url"
    return {"type": name, name: {"url": f"data:{kind};base64,{encoded}"}}


def text_part(text: str) -> dict[str, Any]:
    """A content part that is text."""
    return {"type": "text", "text": text}


class Chat:
    """`spec.model` at `spec.url`, which ends before /chat/completions."""

    def __init__(self, spec: Any, endpoint: Endpoint):
        self.endpoint = endpoint
        self.base = endpoint.url.rstrip("/")
        self.model, self.attempts, self.max_tokens = spec.model, spec.attempts, spec.max_tokens

    async def check(self, deadline: float, retries: int = 3) -> None:
        """Raises EndpointError or Deadline unless the endpoint lists its models and `model` is one of them."""
        url = f"{self.base}/models"
        found = await self.endpoint.request("GET", url, deadline, retries=retries, first_wait=0.2)
        listed = found.get("data") if isinstance(found, dict) else None
        if not isinstance(listed, list):
            raise EndpointError(f"GET {url}: no list of models; is it an OpenAI-compatible endpoint?")
        names = [str(one.get("id")) for one in listed if isinstance(one, dict)]
        if self.model not in names:
            raise EndpointError(
                f'GET {url}: it serves {", ".join(names[:8]) or "nothing"}, and not model = "{self.model}"'
            )

    async def ask(self, content: list[dict[str, Any]], read: Callable[[str], T], deadline: float) -> T:
        """`read` of the model's answer to one user turn.

        `read` raises ValueError, in one line, for an answer that it cannot read; the question is then asked again.
        Raises EndpointError after `attempts` such answers, with the last one's beginning.
        """
        for attempt in range(self.attempts):
            answer = await self._answer(content, attempt, deadline)
            try:
                return read(answer)
            except ValueError as error:
                problem = f"{error}: {self.endpoint.clean(answer).strip()[:120]!r}"
        raise EndpointError(f"{self.model} gave {self.attempts} answers that cannot be read; the last: {problem}")

    async def _answer(self, content: list[dict[str, Any]], attempt: int, deadline: float) -> str:
        url = f"{self.base}/chat/completions"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": _LATER_TEMPERATURE if attempt else 0.0,
            "seed": attempt,
        }
        reply = await self.endpoint.request("POST", url, deadline, body=body)
        try:
            answer = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise EndpointError(f"POST {url}: not a chat completion: {self.endpoint.clean(str(reply))[:120]!r}") from None
        return answer if isinstance(answer, str) else ""
