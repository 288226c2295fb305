"""Generated clips for the demo sets: a coloured square that stands still, or moves sideways or up and down."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from omnitrain.data.demo import COLOURS, PITCHES, RATE, SIZE, tone

MOTIONS = ("sideways", "up and down", "still")
FRAMES = 8
FPS = 8
SECONDS = FRAMES / FPS
_SQUARE = SIZE // 2
_PAPER = 128


def write_clip(path: Path, colour: str, motion: str, *, sound: bool, rng: random.Random) -> None:
    """An MP4 of FRAMES frames of SIZE x SIZE pixels; with `sound`, a tone of either pitch in its track.

    The same arguments give the same bytes with one build of the encoders.
    """
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    frames = _frames(colour, motion, rng)
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        # Several threads would cut the frames differently from machine to machine.
        video = container.add_stream("libx264", rate=FPS, options={"crf": "18", "preset": "veryfast", "threads": "1"})
        video.width = video.height = SIZE
        video.pix_fmt = "yuv420p"
        audio = container.add_stream("aac", rate=RATE, layout="mono") if sound else None
        for frame in frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(video.encode())
        if audio:
            samples = tone(rng.choice(list(PITCHES.values())), rng, SECONDS).astype(np.float32) / 32768
            block = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
            block.sample_rate, block.pts = RATE, 0
            container.mux(audio.encode(block))
            container.mux(audio.encode())


def _frames(colour: str, motion: str, rng: random.Random) -> np.ndarray:
    """(FRAMES, SIZE, SIZE, 3) uint8. The square crosses the whole picture, in either direction."""
    shade = np.clip(np.array(COLOURS[colour]) + [rng.randint(-20, 20) for _ in range(3)], 0, 255)
    travel = np.linspace(0, SIZE - _SQUARE, FRAMES).round().astype(int)[:: rng.choice((1, -1))]
    middle = (SIZE - _SQUARE) // 2 + rng.randint(-2, 2)
    frames = np.full((FRAMES, SIZE, SIZE, 3), _PAPER, np.uint8)
    for frame, place in zip(frames, travel, strict=True):
        left = place if motion == "sideways" else middle
        top = place if motion == "up and down" else middle
        frame[top : top + _SQUARE, left : left + _SQUARE] = shade
    return frames
