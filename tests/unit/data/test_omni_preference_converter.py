"""Omni-Preference: the Context block, the verdict, files by kind, and a held-out split that no shuffle changes."""

import json
import random

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omnitrain.data.converters import convert
from omnitrain.data.converters.omni_preference import parse_context
from omnitrain.data.demo_clips import write_clip
from omnitrain.data.schema import RowFile, system_hash
from omnitrain.errors import DataError

FILES = {
    "image": ("/data/rlaif-v-dataset/coco/a.png", "rlaif-v-dataset/coco/a.png"),
    "audio": ("/data/audio/Lake_Wars &amp; more.wav", "audio_files/audio_files/Lake Wars & more.wav"),
    "video": ("/data/academic_source/Charades/2D98B", "video-dataset/academic_source/Charades/2D98B.mp4"),
}
"""Kind -> the path in the record, and the file."""


def context(kind="image", path=None, question="What is it?", a="A cat.", b="A dog.\nA big one."):
    path = FILES[kind][0] if path is None else path
    return (
        f"<{kind}>You are a judge. Question: none.\n\n### Context\n{kind.capitalize()} file: {path}_  \n"
        f"Question: {question}\nCandidate A: {a}\nCandidate B: {b}\n"
    )


def record(kind="image", text=None, path=None, **solution):
    solution = {"score_A": 4, "score_B": 9, "better": "B", "reasoning": "", **solution}
    path = FILES[kind][0] if path is None else path
    messages = [{"role": "user", "content": context(kind, path) if text is None else text}]
    return {f"{kind}s": [path], "messages": messages, "solution": json.dumps(solution)}


def media(root):
    for kind, (_, name) in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "image":
            Image.new("RGB", (8, 8)).save(path)
        elif kind == "audio":
            soundfile.write(path, np.zeros(8000), 16000)
        else:
            write_clip(path, "red", "sideways", sound=True, rng=random.Random(0))


def table(root, kind, *records):
    path = root / "dataset_jsonl" / kind / "final_rl_data.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_each_kind_becomes_a_pair_with_its_file_and_scores(tmp_path):
    root = tmp_path / "Omni-Preference"
    media(root)
    for kind in FILES:
        table(root, kind, record(kind), record(kind, better="A", score_A="7.5", score_B=1))
    report = convert("omni-preference", [tmp_path], tmp_path / "out", validation=0)
    assert (report.kept, report.bad, [s.name for s in report.splits]) == (6, 0, ["train"])
    rows = RowFile(tmp_path / "out/train.parquet")
    assert rows.system_hash == system_hash(None)
    by_id = {row.id: row for row in rows}
    for kind, (named, file) in FILES.items():
        row = by_id[f"omni-preference-{kind}-0"]
        assert (row.modality, row.source, row.answer) == (kind, "omni-preference", None)
        [user] = row.messages
        assert (user.role, user.content[0].path, user.content[1].text) == ("user", f"media/train/{file}", "What is it?")
        assert (row.chosen, row.rejected) == ("A dog.\nA big one.", "A cat.")
        assert {"chosen_score": 9.0, "rejected_score": 4.0, "media": named}.items() <= row.meta.items()
        row = by_id[f"omni-preference-{kind}-1"]
        assert (row.chosen, row.meta["chosen_score"], row.meta["rejected_score"]) == ("A cat.", 7.5, 1.0)


BAD = {
    "not JSON": ("{", "invalid record"),
    "a list": ([], "invalid record"),
    "no messages": ({**record(), "messages": None}, "context does not parse"),
    "messages are texts": ({**record(), "messages": ["### Context"]}, "context does not parse"),
    "content in parts": ({**record(), "messages": [{"content": [{"text": context()}]}]}, "context does not parse"),
    "no block": (record(text="Question: a\nCandidate A: b\nCandidate B: c"), "context does not parse"),
    "no file": (record(text="### Context\nQuestion: a\nCandidate A: b\nCandidate B: c"), "context does not parse"),
    "no question": (record(text=context().replace("Question: What", "What")), "context does not parse"),
    "no candidate B": (record(text=context().replace("Candidate B", "B")), "context does not parse"),
    "B before A": (record(text=context(a="x\nCandidate B: y", b="z")), "context does not parse"),
    "empty question": (record(text=context(question=" ")), "context does not parse"),
    "empty candidate": (record(text=context(b="")), "context does not parse"),
    "of another kind": (record(text=context("video")), "context does not parse"),
    "no solution": ({**record(), "solution": None}, "invalid solution"),
    "solution no JSON": ({**record(), "solution": "B"}, "invalid solution"),
    "solution a list": ({**record(), "solution": "[1]"}, "invalid solution"),
    "no verdict": (record(better=None), "invalid solution"),
    "verdict C": (record(better="C"), "invalid solution"),
    "no score": (record(score_A=None), "invalid solution"),
    "score a word": (record(score_A="good"), "invalid solution"),
    "score NaN": (record(score_A=float("nan")), "invalid solution"),
    "equal": (record(better="equal"), "no strict winner"),
    "equal scores": (record(score_A=9), "no strict winner"),
    "the other one scores higher": (record(better="A"), "scores contradict the verdict"),
    "one text": (record(text=context(b="A cat.")), "identical candidates"),
    "two files": ({**record(), "images": ["a.png", "b.png"]}, "missing image"),
    "file not a text": ({**record(), "images": [None]}, "missing image"),
    "file absent": (record(path="/data/rlaif-v-dataset/coco/none.png"), "missing image"),
    "file is a dot": (record(path="."), "missing image"),
    "file outside": (record(path="/data/rlaif-v-dataset/../../secret.png"), "path outside the data directory"),
    "truncated": (record(path="coco/cut.png"), "truncated image"),
}
BAD_SOUNDS = {
    "absent": (record("audio", path="none.wav"), "missing audio"),
    "no samples": (record("audio", path="/x/zero.wav"), "empty audio"),
    "0 bytes": (record("audio", path="zero_bytes.wav"), "empty audio"),
}
BAD_VIDEOS = {
    "absent": (record("video", path="/data/academic_source/none.mp4"), "missing video"),
    "0 bytes": (record("video", path="/data/academic_source/zero.mp4"), "empty video"),
}


def test_d1_every_drop_reason_is_counted_by_kind_and_left_out(tmp_path):
    root = tmp_path / "Omni-Preference"
    media(root)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype("uint8"))
    noise.save(tmp_path / "secret.png")
    (root / "rlaif-v-dataset/coco/cut.png").write_bytes((tmp_path / "secret.png").read_bytes()[:-500])
    soundfile.write(root / "audio_files/zero.wav", np.zeros(0), 16000)
    (root / "audio_files/zero_bytes.wav").write_bytes(b"")
    (root / "video-dataset/academic_source/zero.mp4").write_bytes(b"")
    expected = {}
    for kind, bad in {"image": BAD, "audio": BAD_SOUNDS, "video": BAD_VIDEOS}.items():
        table(root, kind, *(found for found, _ in bad.values()), record(kind))
        expected |= {f"omni-preference-{kind}-{i}": reason for i, (_, reason) in enumerate(bad.values())}
    report = convert("omni-preference", [root], tmp_path / "out", skip_bad=True, validation=0)
    lines = (tmp_path / "out/train.dropped.jsonl").read_text().splitlines()
    assert {d["id"]: d["reason"] for d in map(json.loads, lines)} == expected
    assert (report.kept, report.bad) == (3, len(expected))


def test_a_record_without_its_list_of_files_goes_by_the_context_block(tmp_path):
    media(tmp_path)
    found = record()
    del found["images"]
    table(tmp_path, "image", found)
    assert convert("omni-preference", [tmp_path], tmp_path / "out", validation=0).bad == 0


_WORDS = st.text(st.characters(codec="utf-8", exclude_characters=":"), min_size=1).map(str.strip).filter(bool)


@given(question=_WORDS, a=_WORDS, b=_WORDS)
def test_whatever_the_texts_are_the_block_gives_them_back(question, a, b):
    found = parse_context(context(question=question, a=a, b=b))
    assert (found["Question:"], found["Candidate A:"], found["Candidate B:"]) == (question, a, b)


def test_labels_may_share_a_line(tmp_path):
    found = parse_context("### Context\nVideo file: a.mp4  Question: Why?  Candidate A: x  Candidate B: y")
    assert found == {"kind": "video", "file": "a.mp4", "Question:": "Why?", "Candidate A:": "x", "Candidate B:": "y"}


def many(root, count=80, order=lambda records: records):
    """`count` pairs over half as many pictures, of which some are copies under another name."""
    records = []
    for number in range(count):
        name = f"rlaif-v-dataset/{number // 2}.png"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number // 2 // 3 * 3, 0, 0)).save(root / name)
        records.append(record(text=context(path=f"/data/{name}", question=f"Question {number}?"), path=f"/data/{name}"))
    return table(root, "image", *order(records))


def sides(out):
    found = {}
    for split in ("train", "validation"):
        for row in RowFile(out / f"{split}.parquet"):
            part = row.messages[0].content
            found[part[1].text] = (split, (row.root / part[0].path).read_bytes())
    return found


def shuffled(records):
    random.Random(1).shuffle(records)
    return records


def test_d6_the_held_out_split_is_the_same_for_shuffled_input_and_shares_no_medium(tmp_path):
    many(tmp_path / "a")
    many(tmp_path / "b", order=shuffled)
    for name in "ab":
        report = convert("omni-preference", [tmp_path / name], tmp_path / f"out-{name}", validation=0.3, seed=5)
        assert [s.name for s in report.splits] == ["train", "validation"] and report.kept == 80 and not report.notes
    first, second = sides(tmp_path / "out-a"), sides(tmp_path / "out-b")
    assert first == second and len(first) == 80
    media = {split: {data for side, data in first.values() if side == split} for split in ("train", "validation")}
    assert not media["train"] & media["validation"]
    assert 8 <= sum(side == "validation" for side, _ in first.values()) <= 40
    convert("omni-preference", [tmp_path / "a"], tmp_path / "out-c", validation=0.3, seed=6)
    assert sides(tmp_path / "out-c") != first, "another seed holds out others"


def test_d6_new_rows_move_no_old_one(tmp_path):
    many(tmp_path / "a", 40)
    many(tmp_path / "b", 80)
    for name in "ab":
        convert("omni-preference", [tmp_path / name], tmp_path / f"out-{name}", validation=0.3)
    few, more = sides(tmp_path / "out-a"), sides(tmp_path / "out-b")
    assert {text: more[text] for text in few} == few


def test_one_medium_cannot_be_cut_and_the_report_says_so(tmp_path):
    media(tmp_path)
    table(tmp_path, "image", record(), record())
    report = convert("omni-preference", [tmp_path], tmp_path / "out")
    [note] = report.splits[1].notes
    assert "all 2 rows fell on one side" in note and "--validation-share" in note


def test_inputs_that_cannot_be_meant_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"no Omni-Preference data here; expected dataset_jsonl/\*/final_rl_data.jsonl"):
        convert("omni-preference", [tmp_path], tmp_path / "out")
    one, two = table(tmp_path / "a", "image", record()), table(tmp_path / "b", "image", record())
    with pytest.raises(DataError, match="files of 2 data sets"):
        convert("omni-preference", [one, two], tmp_path / "out")
    odd = table(tmp_path / "a", "smell", record())
    with pytest.raises(DataError, match="folder must be named image, audio or video"):
        convert("omni-preference", [odd], tmp_path / "out")
    one.write_bytes(b"\xff")
    with pytest.raises(DataError, match="not a UTF-8 text file"):
        convert("omni-preference", [one], tmp_path / "out")
