"""The demo set: the published layout, a learnable task, the right amount of noise in warmup."""

import json
import time

import numpy as np
import pytest
from PIL import Image

from omnitrain.data.converters import convert
from omnitrain.data.demo import OPTIONS, PITCHES, write_demo
from omnitrain.data.media import load_audio, load_image
from omnitrain.data.schema import RowFile
from omnitrain.errors import DataError


def records(root, split):
    return json.loads((root / "AVQA_R1" / split / f"omni_rl_format_{split}.json").read_text())


def seen_and_heard(row):
    """The letter that the row's picture and sound call for."""
    image, audio, _ = row.messages[-1].content
    pixels = np.asarray(load_image(image, row.root)).mean((0, 1))
    samples = load_audio(audio, row.root)
    hertz = np.argmax(np.abs(np.fft.rfft(samples))) * 16000 / len(samples)
    pitch = min(PITCHES, key=lambda name: abs(PITCHES[name] - hertz))
    wanted = f"{'red' if pixels[0] > pixels[2] else 'blue'} {pitch}"
    return next(option[0] for option in OPTIONS if option[3:] == wanted)


def test_demo_goes_through_the_avqa_converter_and_its_answers_are_right(tmp_path):
    write_demo(tmp_path, rows=64)
    report = convert("avqa", [tmp_path], tmp_path / "out")
    assert {s.name: s.kept for s in report.splits} == {"train": 64, "validation": 8, "warmup": 64}
    assert report.bad == 0 and not report.notes, "splits must share no media, and audio is at 16 kHz"
    for split in ("train", "validation"):
        rows = RowFile(tmp_path / "out" / f"{split}.parquet")
        letters = {row.answer[8] for row in rows}
        assert all(row.answer == f"<answer>{seen_and_heard(row)}</answer>" for row in rows)
        assert letters == set("ABCD")
    assert load_image(rows[0].messages[-1].content[0], rows.root).size == (64, 64)
    assert len(load_audio(rows[0].messages[-1].content[1], rows.root)) == 8000


@pytest.mark.parametrize(("noise", "right"), [(0.8, 0.4), (0.0, 1.0), (1.0, 0.25)])
def test_warmup_answers_are_right_as_often_as_the_noise_says(tmp_path, noise, right):
    write_demo(tmp_path, rows=400, warmup_noise=noise)
    convert("avqa", [tmp_path / "AVQA_R1/warmup"], tmp_path / "out")
    rows = list(RowFile(tmp_path / "out/warmup.parquet"))
    share = sum(row.answer == f"<answer>{seen_and_heard(row)}</answer>" for row in rows) / len(rows)
    assert abs(share - right) < 0.08 * (noise > 0) + 1e-9


def test_options_have_one_fixed_sorted_order(tmp_path):
    write_demo(tmp_path, rows=8)
    assert OPTIONS == sorted(OPTIONS) and all(
        r["options"] == OPTIONS for s in ("train", "valid") for r in records(tmp_path, s)
    )


def test_same_seed_same_files_and_other_seed_other_files(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_demo(tmp_path / name, rows=8, seed=seed)
    files = [
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*") if p.is_file()} for n in "abc"
    ]
    assert files[0] == files[1] != files[2]


def test_demo_that_is_there_is_kept_and_another_is_replaced(tmp_path):
    target = write_demo(tmp_path, rows=8)
    picture = target / "train/images/sample_0.png"
    stamp = picture.stat().st_mtime_ns
    write_demo(tmp_path, rows=8)
    assert picture.stat().st_mtime_ns == stamp
    write_demo(tmp_path, rows=4)
    assert len(records(tmp_path, "train")) == 4 and [p.name for p in tmp_path.iterdir()] == ["AVQA_R1"]


def test_someone_elses_avqa_is_never_replaced(tmp_path):
    (tmp_path / "AVQA_R1").mkdir()
    with pytest.raises(DataError, match="is there already and is not a demo set"):
        write_demo(tmp_path)


def test_failed_writing_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(DataError, match="No space left"):
        write_demo(tmp_path, rows=4)
    assert not list(tmp_path.iterdir())


def test_full_size_demo_takes_seconds(tmp_path):
    start = time.process_time()
    write_demo(tmp_path)
    assert time.process_time() - start < 10
    assert [len(records(tmp_path, s)) for s in ("train", "valid", "warmup")] == [768, 96, 768]
