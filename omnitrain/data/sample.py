"""What flows through a step: a row, its prompt, and the sampled response. Imports no torch at module level."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MEDIA = ("image", "audio", "video")


def modality_of(types: Iterable[str]) -> str:
    """The modality of a row with parts of these types: "text", or the media types, as "image+audio"."""
    found = set(types)
    return "+".join(kind for kind in MEDIA if kind in found) or "text"


@dataclass(frozen=True)
class Part:
    """One piece of a message: text, or one media item by path or by bytes."""

    type: str
    """"text", "image", "audio" or "video"."""
    text: str | None = None
    path: str | None = None
    """Relative to the data directory."""
    data: bytes | None = None
    """The encoded file, where the media travels inline."""


@dataclass(frozen=True)
class Message:
    role: str
    content: tuple[Part, ...]


@dataclass(frozen=True)
class Row:
    """One row of a data file."""

    id: str
    messages: tuple[Message, ...]
    answer: str | None
    source: str
    meta: dict[str, Any]
    root: Path
    """The data directory that media paths are relative to."""
    index: int
    """Position in its file, or in the files taken together."""
    chosen: str | None = None
    rejected: str | None = None

    @property
    def modality(self) -> str:
        """"text", or the media types in it, as "image+audio"."""
        return modality_of(part.type for message in self.messages for part in message.content)


@dataclass
class Prompt:
    """A row as the model sees it."""

    row: Row
    ids: list[int]
    """Expanded token ids: one id per media token, as the processor writes them."""
    engine_ids: list[int]
    """The same with one placeholder per media item, which is what the engine expands itself."""
    media: dict[str, Any]
    """Decoded media for the engine, in the sizes that the trainer sees: {"image": [PIL.Image], "audio": [(float32 array,
    16000)], "video": [(uint8 array (frames, height, width, 3), facts)]}. Tracks heard within videos are the first audio."""
    features: dict[str, "torch.Tensor"]
    """Processor outputs for the trainer: pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw,
    input_features, feature_attention_mask."""
    positions: "torch.Tensor"
    """(3, T) int64 multimodal rotary positions."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the engine must know of the media besides: for each video, "second_per_grid_ts" and "use_audio_in_video"."""


@dataclass
class Sample:
    """One sampled response. Small and picklable: ranks exchange these, never media."""

    row: int
    """Row index in the data."""
    group: int
    """Index of the prompt within the step; all samples of one prompt share it."""
    child: int
    """Index within the group."""
    prompt_ids: list[int]
    """Expanded prompt ids as the engine saw them."""
    tokens: list[int]
    """Response ids, end-of-sequence included when it was sampled. Never re-tokenised."""
    logprobs: list[float]
    """The engine's log-probs of `tokens` under the distribution that was sampled from."""
    finish_reason: str
    """"stop" or "length"."""
    text: str = ""
    policy_version: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    """By reward name; a failed one is absent."""
    failed: bool = False
    """A reward failed with policy "skip": in no statistic and in no update."""
    reward_failures: int = 0
    """Rewards that failed on it, whatever their policy made of that."""
    reward: float = float("nan")
    """Weighted sum."""
    advantage: float = 0.0
    reference_sum: float | None = None
    """Summed log-prob of `tokens` under the reference, where it was computed beforehand."""
