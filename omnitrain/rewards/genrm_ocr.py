"""A vision-language model transcribes a generated picture; the score is how near that is to the text asked for."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from omnitrain.rewards.chat import Chat, media_part, text_part
from omnitrain.rewards.http_client import Endpoint

_TASK = (
    "Transcribe all text that can be seen in this picture, exactly as it is written, and answer with that text alone. "
    "If there is none, answer with <none>."
)
_QUOTED = re.compile(r'"([^"]*)"|\u201c([^\u201d]*)\u201d')


def wanted_text(row: dict) -> str:
    """The text that the picture should show: the row's answer, else what stands in double quotes in the prompt.

    Raises ValueError when there is none or it is empty: that prompt is malformed, whatever was drawn.
    """
    quoted = [a or b for a, b in _QUOTED.findall(row.get("prompt") or "")]
    text = row.get("answer") or " ".join(quoted)
    if not normalise(text):
        raise ValueError(f"the prompt {row.get('prompt')!r:.120} holds no text in double quotes to read")
    return text


def normalise(text: str) -> str:
    """Case, spaces and compatible forms of characters do not count."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def levenshtein(a: str, b: str) -> int:
    """Least number of inserted, deleted and replaced characters between two strings."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def likeness(read: str, wanted: str) -> float:
    """1 - min(distance, n) / n for the n characters of `wanted`, both normalised; 1 if `read` contains it."""
    read, wanted = normalise(read), normalise(wanted)
    if wanted in read:
        return 1.0
    return 1.0 - min(levenshtein(read[: 4 * len(wanted)], wanted), len(wanted)) / len(wanted)


def _transcript(answer: str) -> str:
    text = answer.rpartition("</think>")[2].strip().strip("`").strip()
    if not text:
        raise ValueError("an empty answer")
    return "" if text.lower() == "<none>" else text


class Reward:
    """The "genrm_ocr" kind on an open endpoint."""

    def __init__(self, spec: Any, endpoint: Endpoint):
        self.chat = Chat(spec, endpoint)
        self.check = self.chat.check

    async def score(self, response: bytes, row: dict, deadline: float) -> float:
        """0..1. response: the generated picture, as a PNG file's bytes."""
        wanted = wanted_text(row)
        content = [media_part("image/png", response), text_part(_TASK)]
        return await self.chat.ask(content, lambda answer: likeness(_transcript(answer), wanted), deadline)
