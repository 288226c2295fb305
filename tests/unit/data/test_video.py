"""Videos: which frames are seen, and a named reason for every file that cannot be used."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnitrain.data.media import RATE, check_media, inspect, load_track, load_video
from omnitrain.data.sample import Part
from omnitrain.data.video import FrameSampling, encode_video
from omnitrain.errors import DataError

SOUND = (0.3 * np.sin(2 * np.pi * 440 * np.arange(2 * RATE) / RATE)).astype(np.float32)


def ramp(count=30, size=(64, 96)):
    """Frames that brighten evenly."""
    shades = np.linspace(20, 220, count).astype(np.uint8)
    return np.broadcast_to(shades[:, None, None, None], (count, *size, 3)).copy()


def written(path, count=30, fps=15, codec="libx264", times=None, gop=12, options=None):
    """A file in the container of its suffix; `times` in 1/1000 s makes the rate vary."""
    from fractions import Fraction

    import av

    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = 64, 96
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", gop
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, picture in enumerate(ramp(count)):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def seen(path, **sampling):
    return load_video(Part("video", path=path.name), path.parent, FrameSampling(**sampling))


def expected(count, *places):
    return pytest.approx([20 + 200 * place / (count - 1) for place in places], abs=4)


@given(
    seconds=st.floats(0.01, 5000),
    frames=st.integers(1, 10000),
    fps=st.floats(0.1, 30),
    least=st.integers(2, 9),
    more=st.integers(0, 20),
)
def test_the_number_of_frames_is_even_and_within_its_bounds(seconds, frames, fps, least, more):
    count = FrameSampling(fps, least, least + more).count(seconds, frames)
    assert count % 2 == 0 and count >= 2
    assert count <= max(2, min(least + more, frames))
    if frames >= least:
        assert count >= least - least % 2


@pytest.mark.parametrize(
    "name, codec", [("a.mp4", "libx264"), ("a.mkv", "mpeg4"), ("a.webm", "libvpx-vp9"), ("a.avi", "mpeg4")]
)
def test_frames_are_spread_over_the_whole_video(tmp_path, name, codec):
    path = written(tmp_path / name, codec=codec)
    found = inspect(path, "video")
    assert (found.reason, found.frames, found.has_audio) == (None, 30, False) and found.seconds == pytest.approx(2.0)
    video = seen(path)
    assert video.frames.shape == (4, 64, 96, 3) and video.fps == pytest.approx(2.0)
    assert video.frames.mean((1, 2, 3)).tolist() == expected(30, 0, 7, 15, 22)


def test_a_long_video_is_jumped_through_to_the_frames_that_reading_all_of_it_finds(tmp_path, monkeypatch):
    path = written(tmp_path / "long.mp4", count=600, gop=50)
    video = seen(path)
    assert video.frames.mean((1, 2, 3)).tolist() == expected(600, *range(0, 600, 75))
    assert video.fps == pytest.approx(8 / 40)
    monkeypatch.setattr("omnitrain.data.video._SEEK", 10**9)
    assert np.array_equal(video.frames, seen(path).frames)


def test_frames_of_a_varying_rate_are_chosen_by_time(tmp_path):
    times = [*range(0, 1000, 100), *range(1000, 4000, 1000)]  # ten in the first second, then one a second
    video = seen(written(tmp_path / "v.mkv", count=13, codec="mpeg4", times=times), fps=1.0)
    assert video.frames.mean((1, 2, 3)).tolist() == expected(13, 0, 8, 10, 11)


@pytest.mark.parametrize("count, frames", [(1, 2), (2, 2), (3, 2), (5, 4)])
def test_a_short_video_gives_an_even_number_of_frames(tmp_path, count, frames):
    assert len(seen(written(tmp_path / "s.mp4", count=count)).frames) == frames


def test_a_video_taken_on_its_side_is_shown_upright(tmp_path):
    pictures = ramp(4)
    pictures[:, :32] = [250, 10, 10]  # red above
    data = encode_video(pictures, 4)
    matrix = data.index(b"tkhd") + 44  # as telephones write it: to be turned clockwise
    clockwise = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    (tmp_path / "a.mp4").write_bytes(data[:matrix] + clockwise + data[matrix + 36 :])
    frames = seen(tmp_path / "a.mp4").frames
    assert frames.shape == (4, 96, 64, 3)
    assert frames[0, :, 40:, 0].mean() > 200 > 100 > frames[0, :, :24, 0].mean()  # red on the right


def test_the_track_is_the_sound_or_nothing(tmp_path):
    (tmp_path / "loud.mp4").write_bytes(encode_video(ramp(), 15, SOUND))
    (tmp_path / "brief.mp4").write_bytes(encode_video(ramp(), 15, SOUND[:100]))
    (tmp_path / "silent.mp4").write_bytes(encode_video(ramp(), 15))
    track = load_track(Part("video", path="loud.mp4"), tmp_path)
    assert len(track) / RATE == pytest.approx(2.0, abs=0.15) and track.dtype == np.float32
    assert np.argmax(np.abs(np.fft.rfft(track[4000:20000]))) == pytest.approx(440, abs=2)
    assert load_track(Part("video", path="silent.mp4"), tmp_path) is None
    facts = {name: inspect(tmp_path / f"{name}.mp4", "video") for name in ("loud", "silent")}
    assert facts["loud"].has_audio and facts["loud"].rate == RATE and not facts["silent"].has_audio
    assert inspect(tmp_path / "loud.mp4", "audio").seconds == pytest.approx(2.0, abs=0.15)
    assert check_media(tmp_path / "silent.mp4", "audio") == "no audio track"


def sound_only():
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=RATE, layout="mono")
        block = av.AudioFrame.from_ndarray(SOUND[None], format="fltp", layout="mono")
        block.sample_rate = RATE
        container.mux(stream.encode(block))
        container.mux(stream.encode())
    return file.getvalue()


def cut(path, share):
    data = path.read_bytes()
    return data[: int(len(data) * share)]


@pytest.mark.parametrize(
    "make, reason",
    [
        pytest.param(lambda p: b"", "empty video", id="nothing"),
        pytest.param(lambda p: b"no video at all" * 99, "unreadable video", id="text"),
        pytest.param(lambda p: sound_only(), "video without frames", id="a sound"),
        pytest.param(lambda p: cut(written(p / "a.mp4"), 0.4), "unreadable video", id="mp4 without its index"),
        pytest.param(
            lambda p: cut(written(p / "a.mp4", 300, options={"movflags": "faststart"}), 0.6),
            "truncated video",
            id="cut mp4",
        ),
        pytest.param(lambda p: cut(written(p / "a.mkv", 150, codec="mpeg4"), 0.6), "truncated video", id="cut mkv"),
        pytest.param(
            lambda p: cut(written(p / "a.webm", 150, codec="libvpx-vp9"), 0.6), "truncated video", id="cut webm"
        ),
    ],
)
def test_every_bad_video_has_a_reason_and_stops_a_run_by_name(tmp_path, make, reason):
    (tmp_path / "bad").write_bytes(make(tmp_path))
    assert check_media(tmp_path / "bad", "video") == reason
    if not reason.startswith("truncated"):  # what is left of it may hold the frames that are looked at
        with pytest.raises(DataError, match=f"bad: {reason}"):
            seen(tmp_path / "bad")


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_damage_anywhere_is_a_reason_and_never_another_exception(tmp_path_factory, data):
    good = encode_video(ramp(12), 6, SOUND)
    place = data.draw(st.integers(0, len(good) - 1))
    bad = (
        good[:place]
        + bytes([data.draw(st.integers(0, 255))])
        + good[place + 1 : data.draw(st.integers(place, len(good)))]
    )
    path = tmp_path_factory.getbasetemp() / "damaged.mp4"
    path.write_bytes(bad)
    found = inspect(path, "video")
    assert found.reason or found.frames
    try:
        assert seen(path).frames.ndim == 4
    except DataError:
        assert True
