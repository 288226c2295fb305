"""samples/step_N: best and worst with their media."""

import json
import os

from omnitrain.data.sample import Message, Part, Row, Sample
from omnitrain.train.samples import write_samples


def _rows(root):
    content = (Part("image", path="media/a.png"), Part("text", text="What is it?"))
    return [Row("r", (Message("user", content),), "A", "avqa", {}, root, 0)]


def _samples():
    return [Sample(0, 0, child, [], [1], [0.0], "stop", reward=float(child), text=str(child)) for child in range(3)]


def test_best_and_worst_are_written_with_a_link_to_their_media(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(b"png")
    write_samples(tmp_path / "out", _rows(tmp_path), _samples(), groups=1)
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(line["which"], line["reward"]) for line in lines] == [("worst", 0.0), ("best", 2.0)]
    assert lines[0]["media"] == ["media_a.png"] and (tmp_path / "out" / "media_a.png").is_symlink()


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    def no_links(target, link):
        raise PermissionError("no symbolic links here")

    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(b"png")
    monkeypatch.setattr(os, "symlink", no_links)
    write_samples(tmp_path / "out", _rows(tmp_path), _samples(), groups=1)
    assert (tmp_path / "out" / "media_a.png").read_bytes() == b"png"
