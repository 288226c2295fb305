"""A scorer of the user's own behind HTTP.

Request: POST with a JSON object {id, response, prompt, answer, source, meta}. With media, or with a body of bytes (a
PNG, latents as safetensors; never pickle), multipart/form-data: the object in the part "sample", each file in a part
"media" with its media type. Reply: {"score": x} or {"scores": [x]}.
"""

from __future__ import annotations

import asyncio
from typing import Any

from omnitrain.rewards.attachments import media_files
from omnitrain.rewards.http_client import Endpoint, EndpointError, NotOneNumber

# What a scorer that is there may say to an empty sample.
_REFUSES_SAMPLE = (400, 422)


class Reward:
    """The "http" kind on an open endpoint."""

    def __init__(self, spec: Any, endpoint: Endpoint):
        self.endpoint = endpoint
        self.health, self.media = spec.health, spec.media

    async def check(self, deadline: float, retries: int = 3) -> None:
        """Raises EndpointError or Deadline unless the server answers: its health path, else an empty sample."""
        endpoint = self.endpoint
        if self.health:
            await endpoint.request("GET", endpoint.path(self.health), deadline, retries=retries, first_wait=0.2)
            return
        sample = {"id": "canary", "response": "", "prompt": "", "answer": None, "source": "canary", "meta": {}}
        try:
            await endpoint.request("POST", endpoint.url, deadline, body=sample, retries=retries, first_wait=0.2)
        except EndpointError as error:
            if error.status not in _REFUSES_SAMPLE:
                raise

    async def score(self, response: str, row: dict, deadline: float) -> Any:
        """What the server says of a response to `row`, not yet checked to be a finite number."""
        sample = {"response": response} | {key: row.get(key) for key in ("id", "prompt", "answer", "source", "meta")}
        files = await asyncio.to_thread(media_files, row["messages"]) if self.media else []
        return await self.post(sample, files, deadline)

    async def post(self, sample: dict, files: list[tuple[str, bytes]], deadline: float) -> Any:
        """The score of one sample. files: (media type, bytes)."""
        reply = await self.endpoint.request("POST", self.endpoint.url, deadline, body=sample, attachments=files)
        if isinstance(reply, dict) and "score" in reply:
            return reply["score"]
        scores = reply.get("scores") if isinstance(reply, dict) else None
        if isinstance(scores, list) and len(scores) == 1:
            return scores[0]
        if isinstance(scores, list):
            raise NotOneNumber(f"the server returned {len(scores)} scores for one sample")
        raise NotOneNumber(f'the server returned {self.endpoint.clean(str(reply))[:80]!r}, which has no "score"')
