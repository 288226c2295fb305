"""MMK12: inline pictures become files, options are found in the question, each way a record can be bad."""

import io
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from omnitrain.data.converters import convert
from omnitrain.data.converters.mmk12 import options
from omnitrain.data.media import load_image
from omnitrain.data.schema import RowFile
from omnitrain.errors import DataError


def png(shade, form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (10, 6), (shade, 0, 0)).save(file, form)
    return file.getvalue()


def noise():
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype("uint8")).save(file, "JPEG")
    return file.getvalue()


def good(number=0, **changes):
    picture = {"bytes": png(number), "path": None}
    record = {"id": f"q{number}", "question": " What is $x$? ", "answer": "$\\frac{1}{2}$", "subject": "math"}
    return {**record, "image": picture, **changes}


def shard(path, *records, without=()):
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{key: value for key, value in record.items() if key not in without} for record in records]
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def test_record_becomes_a_row_whose_picture_is_a_file_named_by_its_content(tmp_path):
    shard(tmp_path / "data" / "train-00000-of-00002.parquet", good(1), good(2))
    shard(tmp_path / "data" / "train-00001-of-00002.parquet", good(3), good(1, id="again"))
    shard(tmp_path / "data" / "test-00000-of-00001.parquet", good(9, image={"bytes": png(9, "JPEG"), "path": "x.jpg"}))
    report = convert("mmk12", [tmp_path], tmp_path / "out")
    assert {s.name: s.kept for s in report.splits} == {"train": 4, "test": 1} and not report.bad
    rows = list(RowFile(tmp_path / "out/train.parquet"))
    row = rows[0]
    assert [r.id for r in rows] == [f"mmk12-train-{index}" for index in range(4)]
    assert (row.answer, row.source, row.modality) == ("$\\frac{1}{2}$", "mmk12", "image"), "the answer as published"
    assert row.meta == {"id": "q1", "subject": "math"}
    system, user = row.messages
    assert "<answer>" in system.content[0].text and "\\boxed{" in system.content[0].text
    assert [part.text for part in user.content] == [None, "What is $x$?"]
    image = user.content[0]
    assert image.data is None and image.path.endswith(".png") and load_image(image, row.root).size == (10, 6)
    assert (row.root / image.path).read_bytes() == png(1), "the published bytes, not encoded again"
    assert rows[3].messages[1].content[0].path == image.path, "one file for a picture that stands there twice"
    assert len(list((tmp_path / "out/media/train").iterdir())) == 3
    assert RowFile(tmp_path / "out/test.parquet")[0].messages[1].content[0].path.endswith(".jpg")
    assert sorted(os.listdir(tmp_path)) == ["data", "out"], "nothing is left of the folder the pictures waited in"


BAD = [
    (good(question=None), "empty question"),
    (good(question=" "), "empty question"),
    (good(answer=None), "missing answer"),
    (good(answer=" "), "missing answer"),
    (good(image=None), "missing image"),
    (good(image={"bytes": None, "path": "a.png"}), "missing image"),
    (good(image={"bytes": b"", "path": None}), "empty image"),
    (good(image={"bytes": b"hello", "path": None}), "unreadable image"),
    (good(image={"bytes": noise()[:-500], "path": None}), "truncated image"),
]


def test_d1_bad_records_are_counted_by_reason_and_left_out(tmp_path):
    path = shard(tmp_path / "in" / "train-00000-of-00001.parquet", good(1), *(record for record, _ in BAD), good(2))
    report = convert("mmk12", [path], tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["train.dropped.jsonl"] and sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert report.bad == len(BAD)
    report = convert("mmk12", [path], tmp_path / "out", skip_bad=True)
    lines = (tmp_path / "out/train.dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == [reason for _, reason in BAD]
    assert RowFile(tmp_path / "out/train.parquet").ids == ["mmk12-train-0", f"mmk12-train-{len(BAD) + 1}"]
    assert len(list((tmp_path / "out/media/train").iterdir())) == 2, "pictures of dropped rows must not come along"


def test_plain_bytes_a_missing_subject_and_workers_are_fine(tmp_path):
    records = [good(number, image=png(number)) for number in range(20)]
    path = shard(tmp_path / "train-0.parquet", *records, without=("subject",))
    for workers in (1, 2):
        assert convert("mmk12", [path], tmp_path / f"out{workers}", workers=workers).kept == 20
    assert (tmp_path / "out1/train.parquet").read_bytes() == (tmp_path / "out2/train.parquet").read_bytes()
    assert RowFile(tmp_path / "out1/train.parquet")[0].meta == {"id": "q0"}


def test_options_are_kept_for_an_answer_that_is_a_letter(tmp_path):
    question = "How many? A. 1 B. 2"
    path = shard(tmp_path / "train-0.parquet", good(question=question, answer="B"), good(question=question, answer="2"))
    convert("mmk12", [path], tmp_path / "out")
    first, second = RowFile(tmp_path / "out/train.parquet")
    assert first.answer == "B" and first.meta["options"] == {"A": "1", "B": "2"} and "options" not in second.meta


def test_d6_pictures_in_both_splits_are_reported(tmp_path):
    shard(tmp_path / "train-0.parquet", good(1), good(2))
    shard(tmp_path / "test-0.parquet", good(2))
    report = convert("mmk12", [tmp_path], tmp_path / "out")
    assert report.notes == ["1 media files stand in both test and train (splits kept as published)"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Which?\nA. 5.25\nB. 3\nC) x = 1", {"A": "5.25", "B": "3", "C": "x = 1"}),
        ("The area is ( ) A. $2\\pi$ B. $4$; C. none D. both", {"A": "$2\\pi$", "B": "$4$", "C": "none", "D": "both"}),
        ("(A) north (B) south", {"A": "north", "B": "south"}),
        ("Point A: where? Angle B. is 30", {"A": "where? Angle", "B": "is 30"}),
        ("Given A. Find it. A. 1 B. 2", {"A": "1", "B": "2"}),
        ("Find AB. Then C.", {}),
        ("Only A. one", {}),
        ("A. B. C. x", {}),
        ("\uff21 or B", {}),
    ],
)
def test_options_are_read_off_the_question(question, expected):
    assert options(question) == expected


def test_files_that_are_no_shards_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"no MMK12 shard here; expected train-\*\.parquet"):
        convert("mmk12", [tmp_path], tmp_path / "out")
    path = tmp_path / "train-0.parquet"
    path.write_text("hello")
    with pytest.raises(DataError, match="not a readable parquet file"):
        convert("mmk12", [path], tmp_path / "out")
    shard(path, good(), without=("image",))
    with pytest.raises(DataError, match="no column image; it has id, question, answer, subject"):
        convert("mmk12", [path], tmp_path / "out")
    path.write_bytes(shard(tmp_path / "whole.parquet", good()).read_bytes()[:-100])
    with pytest.raises(DataError, match="not a readable parquet file"):
        convert("mmk12", [path], tmp_path / "out")
    assert not (tmp_path / "out").exists() and not [p for p in tmp_path.iterdir() if p.is_dir()]
