"""AVQA: each way a record can be bad, media into the data directory, and nothing half-written."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest
import soundfile
from PIL import Image

from omnitrain.data.converters import convert, placing
from omnitrain.data.media import load_audio, load_image
from omnitrain.data.schema import RowFile, system_hash
from omnitrain.errors import DataError

GOOD = {
    "problem_id": 7,
    "problem": "What rings?",
    "data_type": "image_audio",
    "problem_type": "multiple choice",
    "options": ["A. bell", "B. phone", "C. ear"],
    "solution": "<answer>B</answer>",
    "path": {"image": "images/a.png", "audio": "audios/a.wav"},
    "data_source": "OmniInstruct_v1-AVQA",
}


def write_split(root, split, records, shade=0, rate=16000):
    folder = root / "AVQA_R1" / split
    for name in ("images", "audios"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(folder / "images" / "a.png")
    soundfile.write(folder / "audios" / "a.wav", np.full(rate // 2, shade / 512), rate)
    (folder / f"omni_rl_format_{split}.json").write_text(json.dumps(records))
    return folder


def changed(**changes):
    return {**GOOD, **changes}


def with_path(**paths):
    return changed(path={**GOOD["path"], **paths})


def test_good_record_becomes_a_row(tmp_path):
    write_split(tmp_path, "train", [GOOD])
    report = convert("avqa", [tmp_path], tmp_path / "out")
    assert (report.kept, report.bad, report.notes) == (1, 0, [])
    rows = RowFile(tmp_path / "out" / "train.parquet")
    row = rows[0]
    assert (row.id, row.answer, row.source, row.modality) == (
        "avqa-train-0",
        "<answer>B</answer>",
        "avqa",
        "image+audio",
    )
    assert row.meta == {"problem_id": 7, "problem_type": "multiple choice", "data_source": "OmniInstruct_v1-AVQA"}
    system, user = row.messages
    assert "<answer>" in system.content[0].text and rows.system_hash == system_hash(system.content[0].text)
    assert [part.type for part in user.content] == ["image", "audio", "text"]
    assert user.content[2].text == "What rings?\nA. bell\nB. phone\nC. ear"
    assert load_image(user.content[0], row.root).size == (8, 8) and len(load_audio(user.content[1], row.root)) == 8000


BAD = {
    "a string": ("oops", "invalid record"),
    "path a string": (changed(path="x.png"), "invalid record"),
    "no problem": (changed(problem=None), "empty problem"),
    "blank problem": (changed(problem=" \n"), "empty problem"),
    "video": (changed(data_type="video"), "unsupported modality"),
    "no options": (changed(options=None), "invalid options"),
    "one option": (changed(options=["A. x"]), "invalid options"),
    "nine options": (changed(options=[f"{c}. x" for c in "ABCDEFGHI"]), "invalid options"),
    "letter repeated": (changed(options=["A. x", "A. y"]), "invalid options"),
    "letter skipped": (changed(options=["A. x", "C. y"]), "invalid options"),
    "out of order": (changed(options=["B. x", "A. y"]), "invalid options"),
    "empty option": (changed(options=["A. x", "B. "]), "invalid options"),
    "no letter": (changed(options=["bell", "phone"]), "invalid options"),
    "number": (changed(options=[1, 2]), "invalid options"),
    "bare letter": (changed(solution="B"), "invalid solution"),
    "two letters": (changed(solution="<answer>A</answer><answer>B</answer>"), "invalid solution"),
    "not an option": (changed(solution="<answer>D</answer>"), "invalid solution"),
    "no solution": (changed(solution=None), "invalid solution"),
    "image not named": (with_path(image=""), "missing image"),
    "audio not named": (with_path(audio=None), "missing audio"),
    "image absent": (with_path(image="images/none.png"), "missing image"),
    "audio absent": (with_path(audio="audios/none.wav"), "missing audio"),
    "image a folder": (with_path(image="images"), "missing image"),
    "impossible name": (with_path(image="a\0b"), "missing image"),
    "long name": (with_path(image="a" * 5000), "missing image"),
    "parent folder": (with_path(image="../secret.png"), "path outside the data directory"),
    "absolute": (with_path(audio="/etc/hostname"), "path outside the data directory"),
    "link outside": (with_path(image="images/link.png"), "path outside the data directory"),
    "truncated image": (with_path(image="images/cut.png"), "truncated image"),
    "empty image": (with_path(image="images/empty.png"), "empty image"),
    "not an image": (with_path(image="images/text.png"), "unreadable image"),
    "empty audio": (with_path(audio="audios/empty.wav"), "empty audio"),
    "zero samples": (with_path(audio="audios/zero.wav"), "empty audio"),
    "cut audio": (with_path(audio="audios/cut.wav"), "truncated audio"),
}


@pytest.fixture(scope="module")
def bad_set(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    folder = write_split(root, "train", [GOOD, *(record for record, _ in BAD.values()), GOOD])
    images, audios = folder / "images", folder / "audios"
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype("uint8"))
    noise.save(folder.parent / "secret.png")
    (images / "link.png").symlink_to(folder.parent / "secret.png")
    (images / "cut.png").write_bytes((folder.parent / "secret.png").read_bytes()[:-500])
    (images / "empty.png").write_bytes(b"")
    (images / "text.png").write_text("hello")
    (audios / "empty.wav").write_bytes(b"")
    soundfile.write(audios / "zero.wav", np.zeros(0), 16000)
    (audios / "cut.wav").write_bytes((audios / "a.wav").read_bytes()[:-4000])
    return root


def test_d1_every_drop_reason_is_counted_listed_and_left_out(bad_set, tmp_path):
    report = convert("avqa", [bad_set], tmp_path, skip_bad=True)
    dropped = [json.loads(line) for line in (tmp_path / "train.dropped.jsonl").read_text().splitlines()]
    assert {d["id"]: d["reason"] for d in dropped} == {
        f"avqa-train-{i}": reason for i, (_, reason) in enumerate(BAD.values(), 1)
    }
    assert (report.kept, report.bad, report.splits[0].input) == (2, len(BAD), len(BAD) + 2)
    rows = RowFile(tmp_path / "train.parquet")
    assert rows.ids == ["avqa-train-0", f"avqa-train-{len(BAD) + 1}"]
    media = sorted(p.name for p in (tmp_path / "media").rglob("*") if p.is_file())
    assert media == ["a.png", "a.wav"], "media of dropped rows must not come along"


def test_d1_without_skip_bad_only_the_list_of_dropped_ids_is_written(bad_set, tmp_path):
    report = convert("avqa", [bad_set], tmp_path)
    assert report.bad == len(BAD) and os.listdir(tmp_path) == ["train.dropped.jsonl"]
    assert not report.splits[0].written


def test_list_of_dropped_ids_disappears_when_nothing_is_dropped_any_more(bad_set, tmp_path):
    convert("avqa", [bad_set], tmp_path)
    write_split(tmp_path / "in", "train", [GOOD])
    convert("avqa", [tmp_path / "in"], tmp_path)
    assert not (tmp_path / "train.dropped.jsonl").exists()


def test_splits_are_found_from_any_of_the_usual_folders(tmp_path):
    for split in ("train", "valid", "warmup"):
        write_split(tmp_path, split, [GOOD])
    for number, start in enumerate(
        ([""], ["AVQA_R1"], ["AVQA_R1/train/omni_rl_format_train.json", "AVQA_R1/valid", "AVQA_R1/warmup"])
    ):
        out = tmp_path / f"out{number}"
        report = convert("avqa", [tmp_path / s for s in start], out)
        assert [split.name for split in report.splits] == ["train", "validation", "warmup"]
        assert (out / "validation.parquet").exists()


def test_d6_media_shared_by_published_splits_are_reported_by_content(tmp_path):
    write_split(tmp_path, "train", [GOOD], shade=9)
    folder = write_split(tmp_path, "valid", [with_path(audio="audios/other.wav")], shade=9)
    soundfile.write(folder / "audios" / "other.wav", np.ones(8000) / 3, 16000)
    report = convert("avqa", [tmp_path], tmp_path / "out")
    assert report.notes == ["1 media files stand in both train and validation (splits kept as published)"]
    assert report.kept == 2


def test_other_sample_rates_are_said(tmp_path):
    write_split(tmp_path, "train", [GOOD], rate=44100)
    report = convert("avqa", [tmp_path], tmp_path / "out")
    assert report.splits[0].notes == ["train: 1 at 44100 Hz; audio is resampled to 16000 Hz whenever it is loaded"]
    row = RowFile(tmp_path / "out" / "train.parquet")[0]
    assert len(load_audio(row.messages[1].content[1], row.root)) == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', "expected a JSON list of records, found dict"),
        ("[1,\n 2", r"train.json:2:3: not JSON"),
        ("\udcff", "UTF-8"),
    ],
)
def test_json_that_is_no_list_is_an_error(tmp_path, text, message):
    folder = write_split(tmp_path, "train", [])
    (folder / "omni_rl_format_train.json").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        convert("avqa", [tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_without_avqa_is_an_error_that_says_what_was_expected(tmp_path):
    with pytest.raises(DataError, match="no AVQA data here; expected AVQA_R1/train/omni_rl_format_train.json"):
        convert("avqa", [tmp_path], tmp_path / "out")


def test_media_inside_the_output_directory_stay_where_they_are(tmp_path):
    write_split(tmp_path, "train", [GOOD])
    convert("avqa", [tmp_path], tmp_path)
    assert RowFile(tmp_path / "train.parquet")[0].messages[1].content[0].path == "AVQA_R1/train/images/a.png"
    assert not (tmp_path / "media").exists()


def test_converting_again_gives_the_same_files(tmp_path):
    write_split(tmp_path, "train", [GOOD])
    out = tmp_path / "out"
    convert("avqa", [tmp_path], out)
    first = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    convert("avqa", [tmp_path], out)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == first


def test_media_are_copied_where_links_are_not_possible(tmp_path, monkeypatch):
    write_split(tmp_path, "train", [GOOD])

    def other_file_system(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(placing.os, "link", other_file_system)
    convert("avqa", [tmp_path], tmp_path / "out")
    assert (tmp_path / "out/media/train/images/a.png").stat().st_nlink == 1


def test_full_disk_while_copying_leaves_no_rows_and_no_media(tmp_path, monkeypatch):
    write_split(tmp_path, "train", [GOOD])
    copies = []

    def full(source, target):
        copies.append(target)
        target.write_bytes(source.read_bytes()[:3])
        if len(copies) == 2:
            raise OSError(28, "No space left on device", str(target))

    def no_link(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(placing.os, "link", no_link)
    monkeypatch.setattr(placing.shutil, "copyfile", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        convert("avqa", [tmp_path], tmp_path / "out")
    assert len(copies) == 2 and not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]


def hundred(root):
    folder = write_split(root, "train", [])
    for i in range(100):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / "images" / f"{i}.png")
    records = [with_path(image=f"images/{i}.png") for i in range(100)]
    (folder / "omni_rl_format_train.json").write_text(json.dumps(records))


def test_d4_several_workers_give_the_same_rows(tmp_path):
    hundred(tmp_path)
    for workers in (1, 3):
        assert convert("avqa", [tmp_path], tmp_path / f"out{workers}", workers=workers).kept == 100
    assert (tmp_path / "out1/train.parquet").read_bytes() == (tmp_path / "out3/train.parquet").read_bytes()


@pytest.mark.timeout(60)
def test_d4_a_killed_worker_is_an_error_not_a_hang(tmp_path):
    from multiprocessing import active_children

    hundred(tmp_path)
    killed = threading.Event()

    def kill():
        while not (children := active_children()):
            time.sleep(0.005)
        os.kill(children[0].pid, signal.SIGKILL)
        killed.set()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(DataError, match="a worker process died"):
        convert("avqa", [tmp_path], tmp_path / "out", workers=2)
    assert killed.is_set() and not (tmp_path / "out").exists()
