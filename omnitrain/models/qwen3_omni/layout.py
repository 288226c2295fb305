"""Where media tokens stand in a prompt: placeholders become tokens, and every token gets its three rotary positions.

The rules are the published processor's and the engine's (vLLM-Omni's `get_mrope_input_positions`). Text counts up by one
in all three rows and continues after the largest position of what stands before it. A media item's tokens have, from
that place on:

    sound      i, i, i              of its i-th token
    picture    0, y, x              of the token's place in the picture
    video      floor(t), y, x       t = k * seconds per frame pair * positions per second, of frame pair k

A video heard with its sound track is audio_start, both kinds of tokens merged by t (video first where equal; the ids are
merged by the t that is not rounded), and audio_end.
transformers' own get_rope_index keeps fractions of t; the engine rounds down, and the engine is what samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Span:
    """The tokens of one media item."""

    kind: str
    """"image", "audio" or "video"."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Of a picture or video: frame pairs, rows and columns of tokens."""
    second_per_grid: float = 0.0
    """Seconds from one frame pair of a video to the next."""
    sound: int = 0
    """Tokens of a sound, or of the track that is heard with a video."""


class Layout:
    """Expands prompts for one checkpoint's `thinker_config`."""

    def __init__(self, config) -> None:
        self._ids = {"image": config.image_token_id, "audio": config.audio_token_id, "video": config.video_token_id}
        self._kinds = {token: kind for kind, token in self._ids.items()}
        self._start, self._end = config.audio_start_token_id, config.audio_end_token_id
        self._per_second = config.position_id_per_seconds

    def expand(self, engine_ids: list[int], spans: list[Span]) -> tuple[list[int], torch.Tensor]:
        """Ids and positions (3, T) int64 of a prompt with one placeholder per span, in order of the placeholders."""
        ids: list[int] = []
        positions: list[np.ndarray] = []
        items, following = iter(spans), 0
        for token in engine_ids:
            if token in self._kinds:
                tokens, places = self._span(next(items))
            else:
                tokens, places = [token], np.zeros((3, 1), np.int64)
            ids += tokens
            positions.append(places + following)
            following += int(places.max()) + 1
        return ids, torch.from_numpy(np.concatenate(positions, axis=1))

    def order(self, engine_ids: list[int]) -> Iterator[str]:
        """The kinds of the placeholders, in order."""
        return (self._kinds[token] for token in engine_ids if token in self._kinds)

    def _span(self, span: Span) -> tuple[list[int], np.ndarray]:
        if span.kind == "audio":
            return [self._ids["audio"]] * span.sound, _line(span.sound)
        pairs, height, width = span.grid
        # In float32, as the engine is told it.
        times = np.arange(pairs) * float(np.float32(span.second_per_grid)) * self._per_second
        places = np.indices(span.grid).reshape(3, -1)
        places[0] = np.repeat(times.astype(np.int64), height * width)
        if not span.sound:
            return [self._ids[span.kind]] * places.shape[1], places
        order = merged(np.repeat(times, height * width), span.sound)
        both = np.concatenate([places, _line(span.sound)], axis=1)[:, order]
        video = places.shape[1]
        middle = [self._ids["video"] if index < video else self._ids["audio"] for index in order]
        last = np.full((3, 1), both.max() + 2)
        return [self._start, *middle, self._end], np.concatenate([np.zeros((3, 1), np.int64), both + 1, last], axis=1)


def merged(times: np.ndarray, sounds: int) -> list[int]:
    """The order of video tokens at `times` (rising) and audio tokens at 0, 1, ...: indices into both, video first."""
    order, video, sound = [], 0, 0
    while video < len(times) and sound < sounds:
        if times[video] <= sound:
            order.append(video)
            video += 1
        else:
            order.append(len(times) + sound)
            sound += 1
    return order + list(range(video, len(times))) + list(range(len(times) + sound, len(times) + sounds))


def _line(count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(count), (3, count))
