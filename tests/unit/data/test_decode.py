"""Decoding: what models see and hear, and a named reason for every file that cannot be used."""

import io
import random
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from omnitrain.data import media
from omnitrain.data.media import RATE, check_media, inspect, load_audio, load_image
from omnitrain.data.sample import Part
from omnitrain.errors import DataError


def picture(fmt="PNG", mode="RGB", size=(40, 30)):
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3)).astype("uint8")
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, fmt)
    return buffer.getvalue()


def sound(seconds=0.5, rate=RATE, channels=1, fmt="WAV", hertz=440.0):
    tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([tone] * channels, axis=1), rate, format=fmt)
    return buffer.getvalue()


def m4a_without_audio():
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def m4a(seconds=1.0, rate=44100):
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=rate)
        tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "LA"])
def test_images_of_every_mode_become_rgb(tmp_path, mode):
    (tmp_path / "a.png").write_bytes(picture(mode=mode))
    image = load_image(Part("image", path="a.png"), tmp_path)
    assert (image.mode, image.size) == ("RGB", (40, 30))


def test_transparent_pixels_become_white(tmp_path):
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "a.png")
    assert load_image(Part("image", path="a.png"), tmp_path).getpixel((0, 0)) == (255, 255, 255)


def test_png_pixels_are_exact_by_path_and_inline(tmp_path):
    data = picture()
    (tmp_path / "a.png").write_bytes(data)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    for part in (Part("image", path="a.png"), Part("image", data=data)):
        assert (np.asarray(load_image(part, tmp_path)) == expected).all()


def test_audio_at_16_khz_is_untouched(tmp_path):
    samples = np.random.default_rng(0).integers(-3000, 3000, 8000).astype(np.int16)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    loaded = load_audio(Part("audio", path="a.wav"), tmp_path)
    assert loaded.dtype == np.float32 and (loaded == samples / np.float32(32768)).all()


@pytest.mark.parametrize(
    ("data", "rate"),
    [(sound(rate=44100), 44100), (sound(rate=8000), 8000), (sound(rate=48000, channels=2, fmt="FLAC"), 48000)],
    ids=["44100", "8000", "48000-stereo-flac"],
)
def test_other_rates_and_channels_become_16_khz_mono(tmp_path, data, rate):
    (tmp_path / "a").write_bytes(data)
    loaded = load_audio(Part("audio", path="a"), tmp_path)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(loaded)) / RATE)
    assert loaded.shape == (8000,) and loaded.dtype == np.float32
    middle = slice(800, -800)
    assert np.abs(loaded[middle] - expected[middle]).max() < 2e-3
    assert inspect(tmp_path / "a", "audio").rate == rate


def test_resampling_folds_nothing_back_below_8_khz(tmp_path):
    loaded = load_audio(Part("audio", data=sound(rate=44100, hertz=10000.0)), tmp_path)
    assert np.abs(loaded[800:-800]).max() < 1e-3


def test_sound_track_of_a_container_is_decoded(tmp_path):
    (tmp_path / "a.m4a").write_bytes(m4a())
    loaded = load_audio(Part("audio", path="a.m4a"), tmp_path)
    assert abs(len(loaded) - RATE) < 0.1 * RATE
    peak = np.argmax(np.abs(np.fft.rfft(loaded))) * RATE / len(loaded)
    assert abs(peak - 440) < 3


BAD = [
    ("image", b"", "empty image"),
    ("image", picture()[:-300], "truncated image"),
    ("image", picture("JPEG")[:-300], "truncated image"),
    ("image", b"not a picture at all", "unreadable image"),
    ("audio", b"", "empty audio"),
    ("audio", sound(0), "empty audio"),
    ("audio", sound(0.01), "audio too short"),
    ("audio", sound()[:-1000], "truncated audio"),
    ("audio", b"not a sound at all", "unreadable audio"),
    ("audio", m4a_without_audio(), "no audio track"),
]


@pytest.mark.parametrize(("kind", "data", "reason"), BAD, ids=[f"{i}-{bad[2]}" for i, bad in enumerate(BAD)])
def test_d1_bad_file_has_a_reason_at_prepare_and_an_error_naming_it_at_load(tmp_path, kind, data, reason):
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    assert check_media(path, kind) == reason
    load = load_image if kind == "image" else load_audio
    with pytest.raises(DataError, match=rf"file.bin: {reason}"):
        load(Part(kind, path="file.bin"), tmp_path)


def test_d1_missing_and_outside_files_are_named_at_load(tmp_path):
    inside = tmp_path / "data"
    inside.mkdir()
    (tmp_path / "secret.png").write_bytes(picture())
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    for path in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        with pytest.raises(DataError, match="leaves the data directory"):
            load_image(Part("image", path=path), inside)
    with pytest.raises(DataError, match="gone.png: missing image"):
        load_image(Part("image", path="gone.png"), inside)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "WAV", "FLAC"]), st.integers(0, 2**32), st.floats(0, 1))
def test_d1_no_damage_escapes_as_another_exception(fmt, seed, keep):
    kind = "audio" if fmt in ("WAV", "FLAC") else "image"
    data = bytearray(sound(fmt=fmt) if kind == "audio" else picture(fmt))
    rng = random.Random(seed)
    for _ in range(4):
        data[rng.randrange(len(data))] = rng.randrange(256)
    decode = media._decode_audio if kind == "audio" else media._decode_image
    try:
        decode(io.BytesIO(bytes(data[: int(keep * len(data))])))
    except media.BadMedia as error:
        assert error.reason


def test_a_picture_too_large_to_decode_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (tmp_path / "a.png").write_bytes(picture())
    assert check_media(tmp_path / "a.png", "image") == "unreadable image"


def test_same_bytes_have_the_same_hash(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(picture())
    assert inspect(tmp_path / "a", "image").sha256 == inspect(tmp_path / "b", "image").sha256 != ""
