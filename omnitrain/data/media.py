"""Opening pictures, sounds and videos: decoded the same way by the trainer and the engine, checked whole at prepare time."""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from omnitrain.data.sample import Part
from omnitrain.data.video import FrameSampling, Video, check_video, decode_video
from omnitrain.errors import BadMedia, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATE = 16000
"""Samples per second of every sound the models hear."""

MIN_SECONDS = 0.025
"""One window of the feature extractor; a shorter sound has no frame."""


@dataclass(frozen=True)
class Inspected:
    """What checking a media file found. `reason` is None for a good one."""

    reason: str | None
    detail: str = ""
    rate: int = 0
    """Samples per second of a sound, before resampling."""
    sha256: str = ""
    """Of the file's bytes."""
    seconds: float = 0.0
    """Of a sound or a video."""
    frames: int = 0
    """Of a video."""
    has_audio: bool = False
    """A sound, or a video whose sound track can be used (there is one, and it is long enough to hear)."""


def load_image(part: Part, root: Path) -> Image.Image:
    """Decode an image part to RGB; transparent pixels become white. DataError names the file and what is wrong."""
    return _load(part, root, _decode_image)


def load_audio(part: Part, root: Path, rate: int = RATE) -> "NDArray[np.float32]":
    """Decode an audio part to mono float32 (samples,), resampled to `rate`. DataError as for images."""
    return _load(part, root, lambda file: _resample(*_decode_audio(file), rate))


def load_video(part: Part, root: Path, sampling: FrameSampling) -> Video:
    """Decode the frames of a video part that `sampling` chooses. DataError as for images."""
    return _load(part, root, lambda file: decode_video(file, sampling))


def load_track(part: Part, root: Path, rate: int = RATE) -> "NDArray[np.float32] | None":
    """The sound track of a video part as load_audio gives a sound; None where there is none to hear. DataError."""

    def decode(file: BinaryIO) -> "NDArray[np.float32] | None":
        found = _decode_track(file)
        return None if found is None else _resample(*found, rate)

    return _load(part, root, decode)


def check_media(path: Path, kind: str) -> str | None:
    """Decode a whole "image", "audio" or "video" file; returns the reason it cannot be used, or None."""
    return inspect(path, kind).reason


def inspect(path: Path, kind: str) -> Inspected:
    """Decode a whole "image", "audio" or "video" file, and say what was found. Never raises for a bad file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return Inspected(f"unreadable {kind}", error.strerror or str(error))
    try:
        found = _FACTS[kind](io.BytesIO(data))
    except BadMedia as error:
        return Inspected(error.reason, str(error))
    return Inspected(None, sha256=hashlib.sha256(data).hexdigest(), **found)


def media_path(part: Part, root: Path) -> Path:
    """The file of a part that names one. DataError if it is missing or outside the data directory."""
    root = root.resolve()
    try:
        path = (root / (part.path or "")).resolve()
    except RuntimeError as error:
        raise DataError(f"{root / (part.path or '')}: a link that leads to itself; prepare the data again") from error
    if not path.is_relative_to(root):
        raise DataError(f"{part.path}: this {part.type} path leaves the data directory {root}; prepare the data again")
    if not path.is_file():
        raise DataError(f"{path}: missing {part.type}; copy the whole data directory, or prepare the data again")
    return path


def _load(part: Part, root: Path, decode):
    name = "inline"
    try:
        if part.data is not None:
            return decode(io.BytesIO(part.data))
        name = str(path := media_path(part, root))
        with path.open("rb") as file:
            return decode(file)
    except BadMedia as error:
        raise DataError(f"{name}: {error}; replace it, or prepare the data again with --skip-bad") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error


def _decode_image(file: BinaryIO) -> Image.Image:
    if not file.read(1):
        raise BadMedia("empty image", "0 bytes")
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(file)
            image.load()
    except UnidentifiedImageError as error:
        raise BadMedia("unreadable image", "not an image file") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadMedia("unreadable image", str(error)) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # PIL has no class of its own for a file that ends early; it says so in words that differ by format.
        cut = any(
            word in str(error).lower() for word in ("truncated", "not enough", "unexpected end", "eof", "incomplete")
        )
        raise BadMedia("truncated image" if cut else "unreadable image", str(error)) from error
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image).convert("RGB")
    return image.convert("RGB")


def _decode_audio(file: BinaryIO) -> tuple["NDArray[np.float32]", int]:
    """Mono samples and their rate."""
    import soundfile

    head = file.read(12)
    if not head:
        raise BadMedia("empty audio", "0 bytes")
    size = file.seek(0, io.SEEK_END)
    declared = int.from_bytes(head[4:8], "little") + 8
    # libsndfile reads what is there of a WAV file that ends early. A writer to a pipe leaves 2**32 - 1.
    if head[:4] == b"RIFF" and head[8:] == b"WAVE" and size + 1 < declared < 2**32:
        raise BadMedia("truncated audio", f"{size} of {declared} bytes")
    file.seek(0)
    try:
        samples, rate = _decode_sndfile(file)
    except soundfile.LibsndfileError:
        file.seek(0)
        samples, rate = _decode_container(file)
    if not len(samples):
        raise BadMedia("empty audio", "zero samples")
    if len(samples) < MIN_SECONDS * rate:
        raise BadMedia("audio too short", f"{len(samples)} samples at {rate} Hz, under {MIN_SECONDS:g} s")
    if not np.isfinite(samples).all():
        raise BadMedia("unreadable audio", "samples that are not finite")
    return samples.mean(axis=1, dtype=np.float32), rate


def _decode_sndfile(file: BinaryIO) -> tuple["NDArray[np.float32]", int]:
    """(samples, channels) and the rate. In blocks, since a damaged header may promise terabytes."""
    import soundfile

    with soundfile.SoundFile(file) as sound:
        blocks = [sound.read(0, dtype="float32", always_2d=True)]
        while len(block := sound.read(1 << 20, dtype="float32", always_2d=True)):
            blocks.append(block)
        return np.concatenate(blocks), sound.samplerate


def _decode_container(file: BinaryIO) -> tuple["NDArray[np.float32]", int]:
    """What libsndfile does not read (m4a, aac, the sound track of a video): (samples, channels) and the rate."""
    import av

    try:
        with av.open(file) as container:
            if not container.streams.audio:
                raise BadMedia("no audio track")
            stream = container.streams.audio[0]
            resampler = av.AudioResampler(format="fltp")
            frames = [out.to_ndarray() for frame in container.decode(stream) for out in resampler.resample(frame)]
            rate = stream.codec_context.sample_rate
    except (av.FFmpegError, UnicodeDecodeError) as error:
        raise BadMedia("unreadable audio", str(error)) from error
    return (np.concatenate(frames, axis=1).T if frames else np.zeros((0, 1), np.float32)), rate


def _decode_track(file: BinaryIO) -> tuple["NDArray[np.float32]", int] | None:
    try:
        return _decode_audio(file)
    except BadMedia as error:
        if error.reason in ("no audio track", "empty audio", "audio too short"):
            return None
        raise


def _image_facts(file: BinaryIO) -> dict:
    _decode_image(file)
    return {}


def _audio_facts(file: BinaryIO) -> dict:
    samples, rate = _decode_audio(file)
    return {"rate": rate, "seconds": len(samples) / rate, "has_audio": True}


def _video_facts(file: BinaryIO) -> dict:
    facts = check_video(file)
    file.seek(0)
    track = _decode_track(file)
    return {
        "seconds": facts.seconds,
        "frames": facts.frames,
        "has_audio": track is not None,
        "rate": track[1] if track else 0,
    }


_FACTS = {"image": _image_facts, "audio": _audio_facts, "video": _video_facts}


def _resample(samples: "NDArray[np.float32]", rate: int, to: int) -> "NDArray[np.float32]":
    if rate == to:
        return samples
    import soxr

    return soxr.resample(samples, rate, to, quality="HQ").astype(np.float32, copy=False)
