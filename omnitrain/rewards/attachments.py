"""The media of a prompt as files for a server. `messages` are plain turns with absolute paths (see facts.py)."""

from __future__ import annotations

import io
from pathlib import Path

_SUFFIXES = {
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".m4a": "audio/mp4",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
    ".mov": "video/quicktime",
}
# What every server can open; another picture is sent as PNG.
_PICTURES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


def media_files(messages: list[dict]) -> list[tuple[str, bytes]]:
    """(media type, bytes) of each picture, sound and video, in the order of the prompt. Raises OSError for a file
    that cannot be read."""
    parts = [part for message in messages for part in message["content"] if part["type"] != "text"]
    return [media_file(part) for part in parts]


def media_file(part: dict) -> tuple[str, bytes]:
    """(media type, bytes) of one part, which has a path or the encoded file in `data`."""
    data = part["data"] if part.get("data") is not None else Path(part["path"]).read_bytes()
    if part["type"] == "image":
        return _picture(data)
    suffix = Path(part.get("path") or "").suffix.lower()
    found = _SUFFIXES.get(suffix)
    return found or {"audio": "audio/wav", "video": "video/mp4"}[part["type"]], data


def _picture(data: bytes) -> tuple[str, bytes]:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        if image.format in _PICTURES:
            return _PICTURES[image.format], data
        file = io.BytesIO()
        image.convert("RGB").save(file, "PNG")
        return "image/png", file.getvalue()
