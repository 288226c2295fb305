"""Media of a row as the model takes them: opened, brought to size once for both sides, and made into features.

The engine is given the pictures and frames in their final size and told to leave it, so that neither the sizes nor the
frames can differ between it and the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import pad

from omnitrain.data.media import load_audio, load_image, load_track, load_video
from omnitrain.data.sample import Part, Row
from omnitrain.data.video import FrameSampling
from omnitrain.errors import DataError
from omnitrain.models.qwen3_omni.audio import tokens
from omnitrain.models.qwen3_omni.layout import Span
from omnitrain.recipe.data import Pixels, Video


@dataclass
class Clip:
    """One video."""

    frames: np.ndarray
    """(n, height, width, 3) uint8, in final size."""
    second_per_grid: float
    """Seconds between frame pairs, to the millisecond."""
    track: np.ndarray | None = None
    """The sound track (samples,), if it is heard between the frames."""


@dataclass
class Media:
    """The media of one row, each kind in order."""

    images: list[Image.Image] = field(default_factory=list)
    sounds: list[np.ndarray] = field(default_factory=list)
    videos: list[Clip] = field(default_factory=list)
    separate: set[int] = field(default_factory=set)
    """id() of the video parts whose track is among `sounds`, right after them."""

    @property
    def count(self) -> dict[str, int]:
        """Placeholders of each kind."""
        return {"image": len(self.images), "audio": len(self.sounds), "video": len(self.videos)}

    @property
    def heard(self) -> list[np.ndarray]:
        """All sounds in the order of the engine: tracks heard within videos, then sounds of their own."""
        return [clip.track for clip in self.videos if clip.track is not None] + self.sounds

    def for_engine(self) -> dict[str, list]:
        """Prompt.media."""
        media: dict[str, list] = {
            "image": self.images,
            "audio": [(sound, Features.RATE) for sound in self.heard],
            "video": [(clip.frames, _facts(clip)) for clip in self.videos],
        }
        return {kind: items for kind, items in media.items() if items}

    def options(self) -> dict[str, list]:
        """Prompt.options."""
        if not self.videos:
            return {}
        return {
            "second_per_grid_ts": [clip.second_per_grid for clip in self.videos],
            "use_audio_in_video": [clip.track is not None for clip in self.videos],
        }


class Features:
    """Opens media and computes features with the parts of one Qwen3-Omni processor."""

    RATE = 16000

    def __init__(self, processor, image: Pixels, video: Video, use_audio_in_video: bool | Literal["separate"]) -> None:
        self._pictures, self._frames = processor.image_processor, processor.video_processor
        self._ear = processor.feature_extractor
        self._image, self._video, self._track = image, video, use_audio_in_video
        self._sampling = FrameSampling(video.fps, video.min_frames, video.max_frames)

    def load(self, row: Row, parts: list[Part]) -> Media:
        """Open the media parts of a row. DataError for what cannot be opened, or not be used together."""
        media = Media()
        for part in parts:
            if part.type == "image":
                picture = _scale(row, _channels_first(load_image(part, row.root)), self._pictures, self._image)
                media.images.append(Image.fromarray(picture.permute(1, 2, 0).numpy()))
            elif part.type == "audio":
                media.sounds.append(self._whole_frames(load_audio(part, row.root, self.RATE)))
            elif part.type == "video":
                self._load_video(media, row, part)
        if media.sounds and any(clip.track is not None for clip in media.videos):
            raise DataError(
                f"row {row.id!r}: a sound beside a video that is heard with its own track; the engine takes one or the "
                'other: set data.use_audio_in_video = "separate" or false, or leave such rows out'
            )
        return media

    def _load_video(self, media: Media, row: Row, part: Part) -> None:
        video = load_video(part, row.root, self._sampling)
        frames = _scale(row, torch.from_numpy(video.frames).permute(0, 3, 1, 2), self._frames, self._video)
        pair = self._frames.temporal_patch_size
        clip = Clip(frames.permute(0, 2, 3, 1).contiguous().numpy(), max(0.001, round(pair / video.fps, 3)))
        media.videos.append(clip)
        track = load_track(part, row.root, self.RATE) if self._track else None
        if track is not None and self._track == "separate":
            media.sounds.append(self._whole_frames(track))
            media.separate.add(id(part))
        elif track is not None:
            clip.track = self._whole_frames(track)

    def _whole_frames(self, sound: np.ndarray) -> np.ndarray:
        """Padded with silence to whole mel frames, as the engine does: the last frame would differ."""
        return np.pad(sound, (0, -len(sound) % self._ear.hop_length))

    def compute(self, media: Media) -> tuple[dict[str, torch.Tensor], dict[str, Iterator[Span]]]:
        """Prompt.features, and the spans of each kind of placeholder, in order."""
        features: dict[str, torch.Tensor] = {}
        images: list[Span] = []
        if media.images:
            features |= _pick(self._pictures(images=media.images, do_resize=False, return_tensors="pt"))
            images = [Span("image", self._grid(grid, self._pictures)) for grid in features["image_grid_thw"].tolist()]
        lengths: list[int] = []
        if media.heard:
            features |= self._hear(media.heard)
            lengths = [tokens(count) for count in features["feature_attention_mask"].sum(-1).tolist()]
        videos: list[Span] = []
        if media.videos:
            frames = [torch.from_numpy(clip.frames).permute(0, 3, 1, 2) for clip in media.videos]
            options = dict(do_resize=False, do_sample_frames=False, return_tensors="pt")
            features |= _pick(self._frames(videos=frames, **options))
            for clip, grid in zip(media.videos, features["video_grid_thw"].tolist(), strict=True):
                sound = lengths.pop(0) if clip.track is not None else 0
                videos.append(Span("video", self._grid(grid, self._frames), clip.second_per_grid, sound))
        sounds = [Span("audio", sound=length) for length in lengths]
        return features, {"image": iter(images), "video": iter(videos), "audio": iter(sounds)}

    def _hear(self, sounds: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """Spectrograms (n, mels, frames) and their masks (n, frames), one by one: in a batch the end of a sound would look
        otherwise where a longer one is beside it."""
        options = dict(sampling_rate=self.RATE, padding=True, truncation=False, return_attention_mask=True)
        each = [self._ear([sound], return_tensors="pt", **options) for sound in sounds]
        longest = max(one["attention_mask"].shape[-1] for one in each)
        padded = lambda t: pad(t, (0, longest - t.shape[-1]))  # noqa: E731
        return {
            "input_features": torch.cat([padded(one["input_features"]) for one in each]),
            "feature_attention_mask": torch.cat([padded(one["attention_mask"]) for one in each]),
        }

    @staticmethod
    def _grid(grid: list[int], processor) -> tuple[int, int, int]:
        return grid[0], grid[1] // processor.merge_size, grid[2] // processor.merge_size


def _facts(clip: Clip) -> dict[str, Any]:
    """What vLLM's parser wants to know of frames that were chosen beforehand."""
    count = len(clip.frames)
    seconds = count / 2 * clip.second_per_grid
    return {
        "fps": count / seconds,
        "duration": seconds,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "omnitrain",
        "do_sample_frames": False,
    }


def _channels_first(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _scale(row: Row, pictures: torch.Tensor, processor, bounds: Pixels) -> torch.Tensor:
    """Pictures (..., 3, height, width) uint8 in the size that the processor of the checkpoint would give them."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import resize
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    factor = processor.patch_size * processor.merge_size
    height, width = pictures.shape[-2:]
    try:
        size = smart_resize(height, width, factor, min_pixels=bounds.min_pixels, max_pixels=bounds.max_pixels)
    except ValueError as error:  # a strip: one side over 200 times the other
        raise DataError(f"row {row.id!r}: a picture of {width} x {height} pixels: {error}") from error
    return resize(pictures, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)


def _pick(found) -> dict[str, torch.Tensor]:
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    return {name: found[name] for name in names if name in found}
