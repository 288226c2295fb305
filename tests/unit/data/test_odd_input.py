"""Input that no parser expects: each is a dropped record or a short error, and nothing half-written stays."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from omnitrain.data.converters import convert
from omnitrain.data.converters.text import parse_json
from omnitrain.data.media import load_image
from omnitrain.data.sample import Part
from omnitrain.data.schema import RowFile
from omnitrain.errors import DataError

DEEP, LONG = "[" * 100_000, "9" * 5000
SOLUTION = '{"score_A": 9, "score_B": 4, "better": "A"}'


def picture(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3)).astype("uint8")).save(path)
    return path


def preference(root, *lines, bom=""):
    picture(root / "rlaif-v-dataset" / "a.png")
    path = root / "dataset_jsonl" / "image" / "final_rl_data.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(bom + "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return root


def pair(solution=SOLUTION, path="rlaif-v-dataset/a.png"):
    text = "### Context\nImage file: a.png\nQuestion: What?\nCandidate A: This.\nCandidate B: That."
    return {"images": [path], "messages": [{"role": "user", "content": text}], "solution": solution}


def dropped(report):
    return [(record.reason, record.detail) for split in report.splits for record in split.dropped_records]


@pytest.mark.parametrize("text", [DEEP, LONG, "{", ""], ids=["deep", "long number", "cut", "empty"])
def test_whatever_is_wrong_with_a_json_text_is_one_kind_of_error(text):
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (DEEP, ("invalid record", "not a JSON object")),
        (f'{{"a": {LONG}}}', ("invalid record", "not a JSON object")),
        (pair(DEEP), ("invalid solution", "not JSON: nested too deep")),
        (pair(f'{{"score_A": {LONG}}}'), ("invalid solution", "not JSON: a number of too many digits")),
        (
            pair({"score_A": 10**400, "score_B": 0, "better": "A"}),
            ("invalid solution", "score_A and score_B must be numbers"),
        ),
        (pair(path="\ud800.png"), ("missing image", "rlaif-v-dataset/\ud800.png")),
    ],
    ids=["deep", "long number", "deep solution", "long score", "score beyond a float", "half a surrogate pair"],
)
def test_d1_a_preference_that_breaks_a_parser_is_dropped_with_its_reason(tmp_path, line, reason):
    report = convert("omni-preference", [preference(tmp_path / "in", line)], tmp_path / "out", validation=0.0)
    assert dropped(report) == [reason]
    (kept,) = (tmp_path / "out" / "train.dropped.jsonl").read_text().splitlines()
    assert (json.loads(kept)["reason"], json.loads(kept)["detail"]) == reason


def test_a_byte_order_mark_hides_no_record(tmp_path):
    report = convert("omni-preference", [preference(tmp_path / "in", pair(), bom="\ufeff")], tmp_path / "out", validation=0.0)
    assert (report.kept, report.bad) == (1, 0)


def shard(folder, **changes):
    data = picture(folder / "p.png").read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"id": ["1"], "question": ["q"], "answer": ["A"], "image": [data], **changes}
    pq.write_table(pa.table(columns), folder / "train-0.parquet")
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answer": [["A"]]}, ("invalid answer", "train-0.parquet, id '1': a list")),
        ({"subject": [b"\xff"]}, ("invalid record", "its meta: Object of type bytes is not JSON serializable")),
    ],
)
def test_d1_a_column_of_another_type_is_dropped_and_never_written_as_its_repr(tmp_path, changes, reason):
    assert dropped(convert("mmk12", [shard(tmp_path / "in", **changes)], tmp_path / "out")) == [reason]


def test_a_shard_that_is_named_twice_is_read_once(tmp_path):
    folder = shard(tmp_path / "in")
    assert convert("mmk12", [folder, folder / "train-0.parquet"], tmp_path / "out").kept == 1


def test_a_table_parted_by_another_mark_says_so(tmp_path):
    (tmp_path / "val.csv").write_text("video;question;answer\n1;2;3\n")
    with pytest.raises(DataError, match="parted by ';'; a CSV file with commas is expected"):
        convert("nextqa", [tmp_path / "val.csv"], tmp_path / "out")


def test_d1_a_link_to_itself_is_missing_media(tmp_path):
    root = preference(tmp_path / "in", pair(path="rlaif-v-dataset/loop.png"))
    (root / "rlaif-v-dataset" / "loop.png").symlink_to("loop.png")
    report = convert("omni-preference", [root], tmp_path / "out", validation=0.0)
    assert dropped(report) == [("missing image", "rlaif-v-dataset/loop.png")]
    with pytest.raises(DataError, match="loop.png"):
        load_image(Part("image", path="loop.png"), root / "rlaif-v-dataset")


def test_rows_that_cannot_be_written_take_their_media_back(tmp_path):
    (tmp_path / "out" / "train.parquet").mkdir(parents=True)
    (tmp_path / "out" / "train.parquet" / "kept").touch()
    with pytest.raises(DataError, match="train.parquet: cannot be written"):
        convert("mmk12", [shard(tmp_path / "in")], tmp_path / "out")
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == ["in/p.png", "in/train-0.parquet", "out/train.parquet/kept"]


def test_q3_a_prepare_that_is_asked_to_end_leaves_nothing_and_no_process(tmp_path):
    shard(tmp_path / "in", **{name: [name] * 400 for name in ("id", "question", "answer")}, image=[
        picture(tmp_path / f"{seed}.png", seed).read_bytes() for seed in range(400)
    ])  # fmt: skip
    command = [sys.executable, "-m", "omnitrain", "prepare", "mmk12", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    give_up = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*")) and time.monotonic() < give_up:
        time.sleep(0.01)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    process.stdout.close()
    assert not list(tmp_path.glob(".out.*")) and not (tmp_path / "out").exists()
    time.sleep(0.5)
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]


def test_the_rows_of_odd_but_good_input_are_whole(tmp_path):
    convert("omni-preference", [preference(tmp_path / "in", pair())], tmp_path / "out", validation=0.0)
    (row,) = RowFile(tmp_path / "out" / "train.parquet")
    assert (row.chosen, row.rejected) == ("This.", "That.")
