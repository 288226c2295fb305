"""NExT-QA: tables and videos found, each way a record or a video can be bad, tracks counted, workers that die."""

import csv
import json
import os
import random
import signal
import threading
import time

import av
import numpy as np
import pytest

from omnitrain.data.converters import convert
from omnitrain.data.demo_clips import write_clip
from omnitrain.data.media import load_track, load_video
from omnitrain.data.schema import RowFile, system_hash
from omnitrain.data.video import FrameSampling
from omnitrain.errors import DataError

COLUMNS = ["video", "frame_count", "width", "height", "question", "answer", "qid", "type", "a0", "a1", "a2", "a3", "a4"]
GOOD = dict(zip(COLUMNS, ["77", "8", "64", "64", " what moves", "1", "6", "TN", "ball", "square", "dog", "cat", "it"]))


def table(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([list(r.values()) if isinstance(r, dict) else r for r in records])
    return path


def clip(path, sound=True, seed=0):
    write_clip(path, "red", "sideways", sound=sound, rng=random.Random(seed))
    return path


def sound_only(path):
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def dropped(out, split="train"):
    lines = (out / f"{split}.dropped.jsonl").read_text().splitlines()
    return {record["id"]: record["reason"] for record in map(json.loads, lines)}


def test_good_record_becomes_a_row_with_five_options_and_its_type(tmp_path):
    table(tmp_path / "val.csv", GOOD)
    clip(tmp_path / "NExTVideo" / "0001" / "77.mp4")
    report = convert("nextqa", [tmp_path], tmp_path / "out")
    assert (report.kept, report.bad, report.splits[0].notes) == (1, 0, [])
    rows = RowFile(tmp_path / "out" / "validation.parquet")
    row = rows[0]
    assert (row.id, row.answer, row.source, row.modality) == (
        "nextqa-validation-77-6",
        "<answer>B</answer>",
        "nextqa",
        "video",
    )
    assert row.meta == {"video": "77", "qid": "6", "type": "TN", "category": "T", "sound_track": True}
    system, user = row.messages
    assert "<answer>" in system.content[0].text and rows.system_hash == system_hash(system.content[0].text)
    assert [part.type for part in user.content] == ["video", "text"]
    assert user.content[1].text == "what moves\nA. ball\nB. square\nC. dog\nD. cat\nE. it"
    assert load_video(user.content[0], row.root, FrameSampling()).frames.shape == (4, 64, 64, 3)
    assert load_track(user.content[0], row.root) is not None


def changed(**changes):
    return {**GOOD, **changes}


BAD = {
    "no question": (changed(qid="1", question=" "), "empty question"),
    "empty option": (changed(qid="2", a3=""), "invalid options"),
    "right option twice": (changed(qid="3", a4="square"), "invalid options"),
    "answer a word": (changed(qid="4", answer="square"), "invalid answer"),
    "answer 5": (changed(qid="5", answer="5"), "invalid answer"),
    "answer -1": (changed(qid="7", answer="-1"), "invalid answer"),
    "too few fields": (["77", "8"], "invalid record"),
    "too many fields": ([*GOOD.values(), "more"], "invalid record"),
    "again": (GOOD, "repeated question"),
    "no such video": (changed(video="78"), "missing video"),
    "unnamed video": (changed(video=""), "missing video"),
    "a path for an id": (changed(video="../77"), "missing video"),
    "0 bytes": (changed(video="100"), "empty video"),
    "cut": (changed(video="101"), "truncated video"),
    "no video stream": (changed(video="102"), "video without frames"),
    "text": (changed(video="103"), "unreadable video"),
    "link outside": (changed(video="104"), "path outside the data directory"),
}


def test_d1_bad_records_and_videos_are_counted_by_reason_and_left_out(tmp_path):
    source, videos = tmp_path / "in", tmp_path / "in" / "videos"
    table(source / "train.csv", GOOD, *(record for record, _ in BAD.values()), changed(qid="9", a4="ball"))
    clip(videos / "77.mp4")
    (videos / "100.mp4").write_bytes(b"")
    cut_matroska(videos / "101.mkv")
    sound_only(videos / "102.mp4")
    (videos / "103.mp4").write_text("hello")
    clip(tmp_path / "secret.mp4", seed=1)
    (videos / "104.mp4").symlink_to(tmp_path / "secret.mp4")
    report = convert("nextqa", [source], tmp_path / "out", skip_bad=True)
    assert list(dropped(tmp_path / "out").values()) == [reason for _, reason in BAD.values()]
    assert (report.kept, report.bad) == (2, len(BAD)), "two wrong options that are alike are no fault"
    assert [p.name for p in (tmp_path / "out/media").rglob("*") if p.is_file()] == ["77.mp4"]


def cut_matroska(path):
    """A Matroska file, which can be opened when its end is missing, cut at half its length."""
    with av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        noise = np.random.default_rng(0).integers(0, 255, (32, 64, 64, 3), np.uint8)
        for picture in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_videos_that_are_not_there_are_reported_not_crashed_on(tmp_path):
    records = [changed(video=str(number), qid="0") for number in range(50)] + [changed(video="77", qid="0")]
    table(tmp_path / "nextqa_val.csv", *records)
    clip(tmp_path / "clips" / "77.mp4")
    report = convert("nextqa", [tmp_path / "nextqa_val.csv", tmp_path / "clips"], tmp_path / "out")
    assert dict(report.dropped) == {"missing video": 50}
    assert os.listdir(tmp_path / "out") == ["validation.dropped.jsonl"]
    report = convert("nextqa", [tmp_path / "nextqa_val.csv", tmp_path / "clips"], tmp_path / "out", skip_bad=True)
    assert (report.kept, report.bad) == (1, 50)


def test_q3_videos_without_a_sound_track_are_named_and_marked(tmp_path):
    for number in range(6):
        clip(tmp_path / "videos" / f"{number}.mp4", sound=number == 0, seed=number)
    table(tmp_path / "train.csv", *(changed(video=str(number)) for number in range(6)))
    report = convert("nextqa", [tmp_path], tmp_path / "out")
    [note] = report.splits[0].notes
    assert "5 of 6 videos have no sound track to hear (1.mp4, 2.mp4, 3.mp4 and 2 more)" in note
    assert [row.meta["sound_track"] for row in RowFile(tmp_path / "out/train.parquet")] == [True] + [False] * 5


def test_map_decides_between_two_videos_of_one_name(tmp_path):
    table(tmp_path / "train.csv", GOOD, changed(video="9"))
    clip(tmp_path / "NExTVideo" / "0001" / "77.mp4", seed=1)
    clip(tmp_path / "NExTVideo" / "0002" / "77.mp4", seed=2)
    clip(tmp_path / "NExTVideo" / "0003" / "other.mp4", seed=3)
    (tmp_path / "map_vid_vidorID.json").write_text(json.dumps({"77": "0002/77", "9": "0003/other"}))
    convert("nextqa", [tmp_path], tmp_path / "out")
    paths = [row.messages[1].content[0].path for row in RowFile(tmp_path / "out/train.parquet")]
    assert paths == ["media/train/NExTVideo/0002/77.mp4", "media/train/NExTVideo/0003/other.mp4"]


def test_tables_are_found_in_a_folder_and_one_level_below(tmp_path):
    clip(tmp_path / "NExTVideo" / "77.mp4")
    for name in ("test.csv", "val.csv", "train.csv"):
        table(tmp_path / "nextqa" / name, GOOD)
    (tmp_path / "nextqa" / "notes.csv").write_text("a,b\n1,2\n")
    report = convert("nextqa", [tmp_path], tmp_path / "out")
    assert [split.name for split in report.splits] == ["train", "validation", "test"]
    assert report.notes[0] == "1 media files stand in both train and validation (splits kept as published)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"video,question\n1,x\n", r"no column answer, qid, type, a0, a1, a2, a3, a4; it has video, question"),
        (b"", "no column video"),
        (",".join(COLUMNS).encode() + b"\n\xff\xfe\n", "not a UTF-8 text file"),
    ],
)
def test_table_that_is_none_is_an_error(tmp_path, text, message):
    (tmp_path / "train.csv").write_bytes(text)
    with pytest.raises(DataError, match=message):
        convert("nextqa", [tmp_path / "train.csv"], tmp_path / "out")


def test_inputs_that_cannot_be_meant_are_errors(tmp_path):
    with pytest.raises(DataError, match="no NExT-QA table here; expected train.csv"):
        convert("nextqa", [tmp_path], tmp_path / "out")
    train = table(tmp_path / "a" / "train.csv", GOOD)
    clip(tmp_path / "b" / "77.mp4")
    clip(tmp_path / "c" / "77.mp4")
    with pytest.raises(DataError, match="name one folder that holds them all"):
        convert("nextqa", [train, tmp_path / "b", tmp_path / "c"], tmp_path / "out")
    with pytest.raises(DataError, match="a second table for split train"):
        convert("nextqa", [train, table(tmp_path / "train_2.csv", GOOD), tmp_path / "b"], tmp_path / "out")
    (tmp_path / "a" / "map_vid_vidorID.json").write_text("[1]")
    with pytest.raises(DataError, match="expected a JSON object of video ids"):
        convert("nextqa", [train, tmp_path / "b"], tmp_path / "out")


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    root = tmp_path_factory.mktemp("hundred")
    for number in range(100):
        clip(root / "videos" / f"{number}.mp4", sound=number % 10 == 0, seed=number)
    table(root / "train.csv", *(changed(video=str(number)) for number in range(100)))
    return root


def test_d4_eight_workers_give_the_same_rows(hundred, tmp_path):
    for workers in (1, 8):
        assert convert("nextqa", [hundred], tmp_path / str(workers), workers=workers).kept == 100
    assert (tmp_path / "1/train.parquet").read_bytes() == (tmp_path / "8/train.parquet").read_bytes()


@pytest.mark.timeout(60)
def test_d4_a_worker_killed_on_a_video_is_an_error_not_a_hang(hundred, tmp_path):
    from multiprocessing import active_children

    def kill():
        while not (children := active_children()):
            time.sleep(0.005)
        os.kill(children[-1].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(DataError, match="a worker process died"):
        convert("nextqa", [hundred], tmp_path / "out", workers=2)
    assert not (tmp_path / "out").exists()
