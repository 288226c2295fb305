"""samples/step_N: best and worst with their media."""

import json
import os

import pytest

from omnitrain.data.sample import Message, Part, Row, Sample
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.train.samples import write_samples


def _rows(root):
    content = (Part("image", path="media/a.png"), Part("text", text="What is it?"))
    return [Row("r", (Message("user", content),), "A", "avqa", {}, root, 0)]


def _samples():
    return [Sample(0, 0, child, [], [1], [0.0], "stop", reward=float(child), text=str(child)) for child in range(3)]


def test_best_and_worst_are_written_with_a_link_to_their_media(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(b"png")
    write_samples(tmp_path / "out", _rows(tmp_path), _samples(), 1, lambda row: list(row.messages))
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(line["which"], line["reward"]) for line in lines] == [("worst", 0.0), ("best", 2.0)]
    assert lines[0]["media"] == ["media_a.png"] and (tmp_path / "out" / "media_a.png").is_symlink()


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    def no_links(target, link):
        raise PermissionError("no symbolic links here")

    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(b"png")
    monkeypatch.setattr(os, "symlink", no_links)
    write_samples(tmp_path / "out", _rows(tmp_path), _samples(), 1, lambda row: list(row.messages))
    assert (tmp_path / "out" / "media_a.png").read_bytes() == b"png"


@pytest.mark.parametrize(
    "system, begins", [(None, "system: Old.\nuser: "), ("New.", "system: New.\nuser: "), ("", "user: ")]
)
def test_the_prompt_is_the_one_the_model_saw(tiny_model, tmp_path, system, begins):
    (row,) = _rows(tmp_path)
    had = Message("system", (Part("text", text="Old."),))
    rows = [Row(row.id, (had, Message("user", (Part("text", text="Hi"),))), "A", "avqa", {}, tmp_path, 0)]
    processing = Processing(str(tiny_model), system=system, max_prompt_tokens=512)
    write_samples(tmp_path / "out", rows, _samples(), 1, processing.messages)
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [begins + "Hi"] * 2
    # The same turns in the tokens that the model is given.
    seen = processing._tokenizer.decode(processing.encode(rows[0]).ids)
    assert [turn in seen for turn in ("Old.", "New.", "Hi")] == [system is None, system == "New.", True]
