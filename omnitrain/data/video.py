"""Opening videos: which frames are looked at, and the frames themselves. The sound track is media.load_audio's.

Frames are chosen once, by time, and both the trainer and the engine are given the same ones. For a video of D seconds
n = min(max_frames, max(min_frames, D * fps)), rounded down to an even number (the vision tower merges frames in pairs)
and to at most the frames there are; frame k is the one on display at k * D / n. So n / D is the rate that the frames
really have, which is `fps` only while neither bound is met.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from omnitrain.errors import BadMedia

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAIR = 2
"""Frames that the vision tower merges into one (temporal_patch_size)."""

_SEEK = 64
"""A gap of more frames than this is jumped over, to the next key frame."""

_DECLARED = ("mp4", "matroska", "avi")
"""Containers whose header says how long they are; others only guess."""


@dataclass(frozen=True)
class FrameSampling:
    """How many frames of a video are looked at."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 8

    def count(self, seconds: float, frames: int) -> int:
        """Frames to take of a video of `frames` frames: even, at least 2 (a single frame is shown twice)."""
        wanted = min(max(seconds * self.fps, self.min_frames), self.max_frames, frames)
        return max(PAIR, int(wanted) // PAIR * PAIR)


@dataclass(frozen=True)
class Video:
    """Chosen frames."""

    frames: "NDArray[np.uint8]"
    """(n, height, width, 3) RGB."""
    fps: float
    """Chosen frames per second of the video."""

    @property
    def seconds(self) -> float:
        return len(self.frames) / self.fps


@dataclass(frozen=True)
class VideoFacts:
    """What decoding a whole video found."""

    frames: int
    seconds: float
    width: int
    height: int


def decode_video(file: BinaryIO, sampling: FrameSampling) -> Video:
    """The chosen frames of an open video file. Raises BadMedia."""
    with _open(file) as (container, stream, index):
        count = sampling.count(index.seconds, len(index.times))
        wanted = [index.at(k * index.seconds / count) for k in range(count)]
        frames = _pick(container, stream, index, wanted)
    shapes = {frame.shape for frame in frames}
    if len(shapes) > 1:
        raise BadMedia("unreadable video", "its frames change size")
    return Video(np.stack(frames), count / index.seconds)


def check_video(file: BinaryIO) -> VideoFacts:
    """Decode a whole video file. Raises BadMedia: "video without frames", "truncated video", "unreadable video"."""
    with _open(file) as (container, stream, index):
        count, size = 0, None
        for frame in _frames(container, stream):
            count += 1
            if size is not None and size != (frame.width, frame.height):
                raise BadMedia("unreadable video", "its frames change size")
            size = frame.width, frame.height
        if size is None:
            raise BadMedia("video without frames", "no frame could be decoded")
        # Some codecs hide a frame or two (edit lists, a leading B-frame); a cut file lacks more.
        if count < 0.9 * len(index.times) - 2:
            raise BadMedia("truncated video", f"{count} of {len(index.times)} frames could be decoded")
    return VideoFacts(count, index.seconds, *size)


def encode_video(
    frames: "NDArray[np.uint8]", fps: int, sound: "NDArray[np.float32] | None" = None, rate: int = 16000
) -> bytes:
    """An MP4 of frames (n, height, width, 3), with mono samples (m,) as its sound track; sides must be even."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=fps)
        pictures.height, pictures.width = frames.shape[1:3]
        pictures.pix_fmt = "yuv420p"
        track = None if sound is None else container.add_stream("aac", rate=rate, layout="mono")
        for frame in frames:
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(pictures.encode())
        if track is not None:
            block = av.AudioFrame.from_ndarray(sound[None].astype(np.float32), format="fltp", layout="mono")
            block.sample_rate = rate
            container.mux(track.encode(block))
            container.mux(track.encode())
    return file.getvalue()


@dataclass(frozen=True)
class _Index:
    """Presentation times of a stream's frames, read without decoding."""

    times: list[int]
    """Sorted, in the stream's time base."""
    keys: list[int]
    """Those of key frames."""
    base: float
    """Seconds per unit."""
    seconds: float

    def at(self, second: float) -> int:
        """The time of the frame on display at `second`, counted from the first frame."""
        slack = 0.1 * self.seconds / len(self.times)  # containers round times, Matroska to milliseconds
        place = bisect_right(self.times, self.times[0] + (second + slack) / self.base) - 1
        return self.times[max(place, 0)]


class _open:
    """Context manager: (container, video stream, index)."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __enter__(self):
        import av

        if not self._file.read(1):
            raise BadMedia("empty video", "0 bytes")
        self._file.seek(0)
        self._container = None
        try:
            self._container = av.open(self._file)
            if not self._container.streams.video:
                raise BadMedia("video without frames", "no video stream in it")
            stream = self._container.streams.video[0]
            index = _index(self._container, stream)
            _rewind(self._container, stream)
        except (av.FFmpegError, UnicodeDecodeError, ValueError) as error:
            self._close()
            raise BadMedia("unreadable video", str(error)) from error
        except BadMedia:
            self._close()
            raise
        return self._container, stream, index

    def __exit__(self, kind, error, traceback) -> None:
        self._close()

    def _close(self) -> None:
        if self._container is not None:
            self._container.close()


def _index(container, stream) -> _Index:
    times, keys, end = [], [], 0.0
    for packet in container.demux():
        if packet.pts is None or not packet.size:
            continue
        end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        # An edit list of MP4 marks frames that are decoded but never shown.
        if packet.stream.index == stream.index and not packet.is_discard:
            times.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
    if not times:
        raise BadMedia("video without frames", "its video stream holds none")
    if stream.frames and len(times) < 0.9 * stream.frames - 2:
        raise BadMedia("truncated video", f"{len(times)} of {stream.frames} frames")
    if container.duration and any(name in container.format.name for name in _DECLARED):
        declared = container.duration / 1e6
        start = (container.start_time or 0) / 1e6
        if declared - (end - start) > max(0.5, 0.1 * declared):
            raise BadMedia("truncated video", f"{end - start:.1f} of {declared:.1f} s")
    times = sorted(set(times))
    base = float(stream.time_base)
    return _Index(times, sorted(keys), base, _seconds(times, base, stream))


def _seconds(times: list[int], base: float, stream) -> float:
    """From the first frame to the end of the last, which is taken to last as long as the others do on average."""
    declared = len(times) / float(stream.average_rate or 1)
    if len(times) == 1:
        return declared
    found = (times[-1] - times[0]) * base * len(times) / (len(times) - 1)
    return declared if abs(declared - found) < 0.01 * found else found  # the times are rounded, the rate is exact


def _pick(container, stream, index: _Index, wanted: list[int]) -> list["NDArray[np.uint8]"]:
    """The frames at the times `wanted` (rising). Where a frame is damaged, the next one that is not."""
    found: dict[int, NDArray[np.uint8]] = {}
    frames = _frames(container, stream)
    current, last, position = None, None, None
    for time in wanted:
        if time in found:
            continue
        key = index.keys[bisect_right(index.keys, time) - 1] if index.keys and index.keys[0] <= time else None
        gap = bisect_right(index.times, time) - (0 if position is None else bisect_right(index.times, position))
        if key is not None and gap > _SEEK and (position is None or key > position):
            _rewind(container, stream, key)
            frames, current = _frames(container, stream), None
        while current is None or current.pts is None or current.pts < time:
            following = next(frames, None)
            if following is None:
                break
            current = following
        if current is None:
            if last is None:
                raise BadMedia("video without frames", "no frame could be decoded")
            found[time] = last
            continue
        position = current.pts
        found[time] = last = _rgb(current)
    return [found[time] for time in wanted]


def _rewind(container, stream, time: int | None = None) -> None:
    container.seek(stream.start_time or 0 if time is None else time, stream=stream, backward=True, any_frame=False)


def _frames(container, stream):
    """Decoded frames. A damaged packet at the end of a stream ends it; one before is a BadMedia."""
    import av

    try:
        yield from container.decode(stream)
    except av.EOFError:
        return
    except (av.FFmpegError, ValueError) as error:
        raise BadMedia("unreadable video", str(error)) from error


def _rgb(frame) -> "NDArray[np.uint8]":
    """(height, width, 3), upright: telephones store the rotation beside the picture."""
    picture = frame.to_ndarray(format="rgb24")
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(picture, turns)) if turns else picture
