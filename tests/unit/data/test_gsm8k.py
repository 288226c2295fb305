"""GSM8K: the number after ####, every drop reason, and names of splits."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnitrain.data.converters import convert
from omnitrain.data.converters.gsm8k import split_of
from omnitrain.data.schema import RowFile, summary_path
from omnitrain.errors import DataError

PUBLISHED = Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k_test.jsonl"


def lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def qa(answer, question="How many?"):
    return {"question": question, "answer": answer}


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published test file is not here")
def test_published_test_file_is_kept_whole(tmp_path):
    report = convert("gsm8k", [PUBLISHED], tmp_path)
    assert (report.kept, report.bad) == (1319, 0)
    rows = RowFile(tmp_path / "test.parquet")
    assert len(rows) == 1319 and rows[0].answer == "18" and rows[0].modality == "text"
    assert [m.role for m in rows[0].messages] == ["system", "user"]
    assert all("," not in row.answer and float(row.answer) is not None for row in rows)
    assert json.loads(summary_path(rows.path).read_text())["rows"] == 1319


@pytest.mark.parametrize(
    ("written", "answer"),
    [("1,234,567", "1234567"), ("-5", "-5"), ("$18", "18"), ("3.50", "3.50"), (".5", ".5"), ("10 ", "10")],
)
def test_answer_is_the_number_after_the_hashes_without_commas(tmp_path, written, answer):
    convert("gsm8k", [lines(tmp_path / "train.jsonl", qa(f"2 #### 3 is not it\n#### {written}"))], tmp_path / "out")
    row = RowFile(tmp_path / "out" / "train.parquet")[0]
    assert row.answer == answer and row.meta["solution"].endswith(written)


def test_d1_every_bad_record_is_dropped_with_its_reason_and_place(tmp_path):
    source = lines(
        tmp_path / "train.jsonl",
        qa("#### 1"), "{not json", "[1, 2]", qa("#### 1", question="  "), qa("no hashes"), qa("#### many"),
        {"question": "q", "answer": None}, qa("#### \ud800", question="\ud800"), "", qa("#### 2"),
    )  # fmt: skip
    report = convert("gsm8k", [source], tmp_path / "out", skip_bad=True)
    assert report.kept == 2
    assert report.dropped == {"invalid record": 2, "empty question": 1, "missing answer": 2, "invalid answer": 2}
    dropped = [json.loads(line) for line in (tmp_path / "out" / "train.dropped.jsonl").read_text().splitlines()]
    assert [d["id"] for d in dropped] == [f"gsm8k-train-{i}" for i in range(1, 8)]
    assert dropped[0]["detail"].startswith("train.jsonl:2:2")
    assert RowFile(tmp_path / "out" / "train.parquet").ids == ["gsm8k-train-0", "gsm8k-train-8"]


def test_question_that_is_not_unicode_is_dropped(tmp_path):
    report = convert(
        "gsm8k", [lines(tmp_path / "t.jsonl", qa("#### 1", "\ud800"), qa("#### 1"))], tmp_path / "out", skip_bad=True
    )
    assert report.dropped == {"invalid record": 1} and report.kept == 1


def test_hub_parquet_shards_are_joined(tmp_path):
    for shard in range(2):
        table = pa.table({"question": [f"q{shard}{i}" for i in range(3)], "answer": ["#### 7"] * 3})
        pq.write_table(table, tmp_path / f"train-0000{shard}-of-00002.parquet")
    convert("gsm8k", sorted(tmp_path.glob("*.parquet")), tmp_path / "out")
    rows = RowFile(tmp_path / "out" / "train.parquet")
    assert [row.messages[-1].content[0].text for row in rows] == ["q00", "q01", "q02", "q10", "q11", "q12"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gsm8k_test.jsonl", "test"), ("train-00000-of-00001.parquet", "train"), ("Valid.jsonl", "validation"),
        ("gsm8k-dev.jsonl", "validation"), ("latest_trainer.jsonl", "latest_trainer"),
    ],
)  # fmt: skip
def test_split_is_read_off_the_name(name, split):
    assert split_of(Path(name)) == split


def test_wrong_inputs_are_named_with_the_fix(tmp_path):
    lines(tmp_path / "train.jsonl", qa("#### 1"))
    with pytest.raises(DataError, match=r"is a directory; name its files \(train.jsonl\)"):
        convert("gsm8k", [tmp_path], tmp_path / "out")
    with pytest.raises(DataError, match="gone.jsonl: no such file"):
        convert("gsm8k", [tmp_path / "gone.jsonl"], tmp_path / "out")
    (tmp_path / "bin.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not a UTF-8 text file"):
        convert("gsm8k", [tmp_path / "bin.jsonl"], tmp_path / "out")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a readable parquet"):
        convert("gsm8k", [tmp_path / "x.parquet"], tmp_path / "out")
    pq.write_table(pa.table({"q": ["a"]}), tmp_path / "y.parquet")
    with pytest.raises(DataError, match="no column answer, question; it has q"):
        convert("gsm8k", [tmp_path / "y.parquet"], tmp_path / "out")
    with pytest.raises(DataError, match="OUT must be a directory"):
        convert("gsm8k", [tmp_path / "train.jsonl"], tmp_path / "bin.jsonl")
    assert not (tmp_path / "out").exists()


def test_output_never_overwrites_its_input(tmp_path):
    pq.write_table(pa.table({"question": ["a"], "answer": ["#### 1"]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="input and output at once"):
        convert("gsm8k", [tmp_path / "train.parquet"], tmp_path)
