"""Pictures, sounds and videos: what the data code decodes is written, read back, and compared."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from omnitrain.doctor.check import OK, PROBLEM, Check, Finding, first_line
from omnitrain.errors import DataError

_REINSTALL = "uv pip install --reinstall pillow soundfile soxr av"


def checks() -> list[Check]:
    """The checks of this file."""
    return [Check("images", images), Check("audio", audio), Check("video", video)]


def images() -> Finding:
    """PNG comes back equal, JPEG nearly."""
    from PIL import Image, features

    from omnitrain.data.media import load_image
    from omnitrain.data.sample import Part

    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    picture = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], np.uint8(128)), axis=-1)
    for kind, tolerance in (("PNG", 0), ("JPEG", 24)):
        buffer = io.BytesIO()
        try:
            Image.fromarray(picture).save(buffer, kind)
            back = np.asarray(load_image(Part("image", data=buffer.getvalue()), Path(".")))
        except (OSError, KeyError, DataError) as error:
            return Finding("images", PROBLEM, f"{kind}: {first_line(str(error))}", _REINSTALL)
        if back.shape != picture.shape or np.abs(back.astype(int) - picture).max() > tolerance:
            return Finding("images", PROBLEM, f"{kind} does not come back as it was written", _REINSTALL)
    return Finding("images", OK, f"PNG, JPEG (pillow {features.version('pil')})")


def audio() -> Finding:
    """WAV at 16 kHz comes back equal; at another rate it is resampled to the same length in seconds."""
    import soundfile

    from omnitrain.data.media import RATE, load_audio
    from omnitrain.data.sample import Part

    for rate in (RATE, 44100):
        tone = np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate).astype(np.float32) / 2
        buffer = io.BytesIO()
        try:
            soundfile.write(buffer, tone, rate, format="WAV", subtype="FLOAT")
            back = load_audio(Part("audio", data=buffer.getvalue()), Path("."))
        except (OSError, RuntimeError, DataError, ImportError) as error:
            return Finding("audio", PROBLEM, f"WAV at {rate} Hz: {first_line(str(error))}", _REINSTALL)
        expected = np.sin(2 * np.pi * 440 * np.arange(RATE // 2) / RATE) / 2
        # A resampler's filter rings at both ends; in between it must be the same tone.
        middle = slice(RATE // 10, 2 * RATE // 5)
        if abs(len(back) - len(expected)) > 1 or np.abs(back[middle] - expected[middle]).max() > 1e-2:
            return Finding("audio", PROBLEM, f"WAV at {rate} Hz does not come back as it was written", _REINSTALL)
    return Finding("audio", OK, f"WAV, resampling to {RATE} Hz ({soundfile.__libsndfile_version__})")


def video() -> Finding:
    """MP4 with pictures and sound: frames and samples come back in number and roughly in value."""
    import av

    try:
        frames, samples = _read_mp4(av, _write_mp4(av, frames=10, grey=160))
    except (av.FFmpegError, ValueError, OSError) as error:
        return Finding("video", PROBLEM, f"mp4: {first_line(str(error))}", _REINSTALL)
    if len(frames) != 10 or abs(float(np.mean(frames)) - 160) > 8 or samples < 8000:
        return Finding("video", PROBLEM, f"mp4: 10 frames and 16000 samples became {len(frames)} and {samples}", _REINSTALL)
    return Finding("video", OK, f"mp4 with sound (av {av.__version__})")


def _write_mp4(av, frames: int, grey: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.width = pictures.height = 64
        pictures.pix_fmt = "yuv420p"
        sound = container.add_stream("aac", rate=16000)
        for _ in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), grey, np.uint8), format="rgb24")
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode(None))
        tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000).astype(np.float32)[None]
        frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
        frame.rate = 16000
        container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
    return buffer.getvalue()


def _read_mp4(av, data: bytes) -> tuple[list[np.ndarray], int]:
    """Frames (H, W, 3) uint8 and the number of audio samples."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    with av.open(io.BytesIO(data)) as container:
        samples = sum(frame.samples for frame in container.decode(audio=0))
    return frames, samples
