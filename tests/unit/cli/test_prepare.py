"""`omnitrain prepare` as a user meets it: the report, the rows shown, exit codes, start-up without heavy imports."""

import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from omnitrain.cli import prepare
from omnitrain.errors import DataError, UsageError


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    main = typer.Typer()
    main.callback()(lambda: None)
    prepare.register(main)
    return lambda *words: CliRunner().invoke(main, ["prepare", *map(str, words)])


def gsm8k(path, *answers):
    path.write_text("".join(json.dumps({"question": "How many?", "answer": a}) + "\n" for a in answers))
    return path


def test_report_counts_input_kept_and_dropped_and_names_files(run, tmp_path):
    result = run("gsm8k", gsm8k(tmp_path / "gsm8k_test.jsonl", "#### 1,000", "x"), tmp_path / "out", "--skip-bad")
    assert result.exit_code == 0, result.output
    numbers = [line.split() for line in result.output.splitlines() if "test" in line and "│" in line]
    assert numbers == [["│", "test", "│", "2", "│", "1", "│", "1", "│"]]
    assert "missing answer" in result.output
    for name in ("test.parquet", "test.dropped.jsonl"):
        assert f"wrote {tmp_path}/out/{name}" in result.output.replace("\n", "")


def test_bad_rows_exit_1_after_the_whole_report_and_write_no_rows(run, tmp_path):
    result = run("gsm8k", gsm8k(tmp_path / "train.jsonl", "#### 1", "x"), tmp_path / "out", "--show", "1")
    assert result.exit_code == 1 and isinstance(result.exception, DataError) and result.exception.exit_code == 1
    assert "1 of 2 records were dropped and no rows were written" in str(result.exception)
    assert "--skip-bad" in str(result.exception) and "missing answer" in result.output
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["train.dropped.jsonl"]


def test_a_split_without_a_good_row_fails_even_with_skip_bad(run, tmp_path):
    result = run("gsm8k", gsm8k(tmp_path / "train.jsonl", "x"), tmp_path / "out", "--skip-bad")
    assert isinstance(result.exception, DataError) and "no row left in train" in str(result.exception)


def test_show_renders_rows_as_the_model_sees_them(run, tmp_path):
    assert run("demo", tmp_path, "--rows", "8").exit_code == 0
    result = run("avqa", tmp_path, tmp_path / "out", "--show", "2")
    assert result.exit_code == 0, result.output
    shown = result.output[result.output.index("row 0") :]
    lines = shown.splitlines()
    assert lines[1] == "id avqa-train-0, source avqa, image+audio"
    assert lines[2].startswith("system: ")
    assert lines[3] == "user: [image media/train/images/sample_0.png 64x64]"
    assert lines[4] == "[audio media/train/audios/sample_0.wav 0.50 s]"
    assert lines[5:10] == ["Which colour and pitch?", "A. blue high", "B. blue low", "C. red high", "D. red low"]
    assert lines[10].startswith("answer: <answer>")
    assert "train.parquet row 1" in shown and "row 2" not in shown


def test_show_tells_what_a_video_holds_and_both_answers_of_a_pair(run, tmp_path):
    assert run("demo", tmp_path, "--only", "nextqa", "--rows", "8").exit_code == 0
    result = run("nextqa", tmp_path / "NExT-QA", tmp_path / "nextqa", "--show", "8")
    assert result.exit_code == 0, result.output
    clip = r"user: \[video media/train/NExTVideo/2000/200000\d.mp4 64x64, 4 frames of 1.00 s, "
    assert len(re.findall(clip + r"without a sound track\]", result.output)) == 6
    assert len(re.findall(clip + r"with 1\.\d\d s of sound\]", result.output)) == 2
    assert "note: train: 6 of 8 videos have no sound track" in result.output
    assert run("demo", tmp_path, "--only", "preference", "--rows", "24").exit_code == 0
    words = ("--validation-share", "0.5", "--seed", "3", "--workers", "2", "--show", "12")
    result = run("omni-preference", tmp_path, tmp_path / "pairs", *words)
    assert result.exit_code == 0, result.output
    assert re.search(r"chosen: It is (\w.*)\.\nrejected: It is (?!\1)\w.*\.", result.output)
    rows = [line for line in result.output.splitlines() if line.startswith(("│ train", "│ validation"))]
    kept = [int(line.split("│")[3]) for line in rows]
    assert sum(kept) == 24 and min(kept) > 4


def test_a_pictures_folder_of_shards_is_prepared_from_the_command_line(run, tmp_path):
    image = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(image)
    record = {"id": "1", "question": "How many?", "answer": "3", "image": {"bytes": image.read_bytes(), "path": None}}
    pq.write_table(pa.Table.from_pylist([record, {**record, "answer": ""}]), tmp_path / "train-0.parquet")
    result = run("mmk12", tmp_path, tmp_path / "out")
    assert isinstance(result.exception, DataError) and "missing answer" in result.output
    result = run("mmk12", tmp_path, tmp_path / "out", "--skip-bad", "--show", "1")
    assert result.exit_code == 0 and re.search(r"user: \[image media/train/[0-9a-f]{64}\.png 4x4\]", result.output)


def test_usage_errors_exit_2(run, tmp_path):
    assert run("gsm8k", "only-one").exit_code == 2
    assert run("nothing", "a", "b").exit_code == 2
    assert run("demo", tmp_path, "--rows", "0").exit_code == 2
    assert run("demo", tmp_path, "--only", "mmk12").exit_code == 2
    assert run("omni-preference", tmp_path, tmp_path / "out", "--validation-share", "1").exit_code == 2
    for words, message in (
        (("tiny", "qwen3_omnni", tmp_path), "unknown model family qwen3_omnni; did you mean qwen3_omni?"),
        (("tiny", "qwen3_omni", tmp_path, "--dtype", "int4"), "must be float32 or bfloat16"),
    ):
        result = run(*words)
        assert isinstance(result.exception, UsageError) and message in str(result.exception)


def test_importing_the_command_imports_nothing_heavy():
    code = (
        "import sys, typer; from omnitrain.cli import prepare; prepare.register(typer.Typer());"
        "print([m for m in ('torch','vllm','transformers','pyarrow','numpy','PIL','datasets') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_preparing_needs_no_torch(tmp_path):
    source = gsm8k(tmp_path / "train.jsonl", "#### 1")
    code = (
        "import sys; from pathlib import Path; from omnitrain.data.converters import convert;"
        f"convert('gsm8k', [Path({str(source)!r})], Path({str(tmp_path / 'out')!r}));"
        "print([m for m in ('torch','vllm','transformers') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
