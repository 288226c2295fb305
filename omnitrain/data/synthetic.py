"""Rows drawn from nothing, for rehearsals: the modalities, labels and pairs that a recipe expects, and media that decode.

A picture is a coloured square, a sound a tone, a video a square that moves while a tone sounds. Everything is inline.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 64
"""Pixels."""
RATE = 16000
SECONDS = 0.5
VIDEO_SECONDS, VIDEO_FPS = 1.0, 8


def write_synthetic(
    path: Path, *, rows: int, modalities: Sequence[str], labels: dict[str, str], pairs: bool = False
) -> Path:
    """Write `rows` rows of each modality to a parquet file; returns its path.

    modalities: as Row.modality says them, "text", "image", "image+audio", "video".
    labels: the `answer` of the rows of each source; each source gets its share of the rows.
    pairs: rows with `chosen` and `rejected` beside it.
    """
    from omnitrain.data.schema import system_hash, write_rows

    drawn = (
        _row(f"synthetic-{path.stem}-{modality}-{index}", modality, index, labels, pairs)
        for modality in modalities
        for index in range(rows)
    )
    write_rows(path, drawn, system_hash=system_hash(None))
    return path


def _row(name: str, modality: str, index: int, labels: dict[str, str], pairs: bool) -> dict[str, Any]:
    source, label = list(labels.items())[index % len(labels)]
    content = [{"type": kind, "data": _DRAW[kind](index)} for kind in modality.split("+") if kind != "text"]
    content.append({"type": "text", "text": f"Which one is it, question {index}?"})
    row = {"id": name, "messages": [{"role": "user", "content": content}], "answer": label, "source": source}
    return row | ({"chosen": f"It is {index}.", "rejected": "It is something else."} if pairs else {})


def picture(index: int) -> bytes:
    """A PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(_square(index, 0.0)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def sound(index: int) -> bytes:
    """A WAV of half a second."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, _tone(index, SECONDS), RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def video(index: int) -> bytes:
    """An MP4 of one second with a sound track."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=VIDEO_FPS, width=SIDE, height=SIDE, pix_fmt="yuv420p")
        tones = container.add_stream("aac", rate=RATE, layout="mono")
        for step in range(int(VIDEO_SECONDS * VIDEO_FPS)):
            frame = av.VideoFrame.from_ndarray(_square(index, step / VIDEO_FPS), format="rgb24")
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode())
        samples = av.AudioFrame.from_ndarray(_tone(index, VIDEO_SECONDS)[None], format="fltp", layout="mono")
        samples.sample_rate = RATE
        container.mux(tones.encode(samples))
        container.mux(tones.encode())
    return file.getvalue()


_DRAW = {"image": picture, "audio": sound, "video": video}


def _square(index: int, seconds: float) -> np.ndarray:
    """(SIDE, SIDE, 3) uint8: a square on grey, its colour by `index`, moving to the right within a second."""
    frame = np.full((SIDE, SIDE, 3), 128, np.uint8)
    left = int(seconds * (SIDE - 24))
    frame[20:44, left : left + 24] = [(index * 67 + shift) % 256 for shift in (0, 85, 170)]
    return frame


def _tone(index: int, seconds: float) -> np.ndarray:
    """(n,) float32, its pitch by `index`."""
    time = np.arange(int(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * (300 + 100 * (index % 16)) * time)).astype(np.float32)
