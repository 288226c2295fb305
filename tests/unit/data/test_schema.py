"""Rows in parquet: what is written comes back, whole or not at all, and other files are refused with the fix."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnitrain.data import schema
from omnitrain.data.schema import RowFile, summary_path, system_hash, write_rows
from omnitrain.errors import DataError


def row(name, **changes):
    content = [
        {"type": "image", "path": "media/a.png"},
        {"type": "audio", "data": b"RIFF"},
        {"type": "text", "text": name},
    ]
    return {"id": name, "messages": [{"role": "user", "content": content}], "answer": "1", "source": "s", **changes}


def write(path, count=3, **changes):
    return write_rows(path, (row(f"r{i}", **changes) for i in range(count)), system_hash=system_hash("be good"))


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "train.parquet"
    assert write(path, meta={"kind": "C", "nested": [1, {"é": None}]}, chosen="yes", rejected="no") == 3
    rows = RowFile(path)
    assert len(rows) == 3 and rows.ids == ["r0", "r1", "r2"] and rows.system_hash == system_hash("be good")
    second = rows[1]
    assert (second.id, second.index, second.root, second.modality) == ("r1", 1, tmp_path.resolve(), "image+audio")
    assert (second.answer, second.chosen, second.rejected) == ("1", "yes", "no")
    assert second.meta == {"kind": "C", "nested": [1, {"é": None}]}
    image, audio, text = second.messages[0].content
    assert (image.path, audio.data, text.text) == ("media/a.png", b"RIFF", "r1")
    assert image.text is None and audio.path is None
    with pytest.raises(IndexError):
        rows[3]


def test_small_row_groups_read_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "_GROUP_ROWS", 4)
    monkeypatch.setattr(schema, "_CACHED_GROUPS", 2)
    path = tmp_path / "x.parquet"
    write(path, 23)
    assert pq.ParquetFile(path).num_row_groups == 6
    rows = RowFile(path)
    for index in (22, 0, 3, 4, 19, 7, 8, 0, 20):
        assert rows[index].id == f"r{index}"
    assert [r.id for r in rows] == rows.ids


def test_inline_media_close_a_row_group_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "_GROUP_BYTES", 100)
    path = tmp_path / "x.parquet"
    content = [{"type": "image", "data": b"x" * 60}]
    write_rows(path, (row(f"{i}", messages=[{"role": "user", "content": content}]) for i in range(6)), system_hash="")
    assert pq.ParquetFile(path).num_row_groups == 3


def test_summary_counts_without_pyarrow(tmp_path):
    path = tmp_path / "train.parquet"
    write(path)
    summary = json.loads(summary_path(path).read_text())
    assert summary["rows"] == 3 and summary["modalities"] == {"image+audio": 3} and summary["sources"] == {"s": 3}
    assert summary["schema_version"] == schema.SCHEMA_VERSION and len(summary["sha256"]) == 64


@pytest.mark.parametrize(
    ("version", "fix"),
    [(b"2", "install the omnitrain that wrote it"), (b"0", "prepare it again"), (None, "convert it with")],
)
def test_another_schema_version_is_refused_with_the_fix(tmp_path, version, fix):
    path = tmp_path / "train.parquet"
    write(path)
    table = pq.read_table(path)
    metadata = {**table.schema.metadata, b"omnitrain.schema_version": version} if version else None
    pq.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(DataError, match=f"train.parquet: .*{fix}"):
        RowFile(path)


def test_missing_file_directory_and_damage_are_named(tmp_path):
    path = tmp_path / "train.parquet"
    with pytest.raises(DataError, match="train.parquet: no such file.*omnitrain prepare"):
        RowFile(path)
    write(path)
    with pytest.raises(DataError, match=r"is a directory; name a parquet file in it \(train.parquet\)"):
        RowFile(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="not a readable parquet file"):
        RowFile(path)


def test_damage_inside_a_row_group_is_a_data_error(tmp_path):
    path = tmp_path / "train.parquet"
    write(path, 50)
    data = bytearray(path.read_bytes())
    data[20:200] = bytes(180)
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        RowFile(path)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ""}, "non-empty"),
        ({"source": ""}, "source and messages"),
        ({"label": 1}, "unknown column label"),
        ({"messages": [{"role": "user", "content": [{"type": "smell", "text": "x"}]}]}, "type 'smell'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}, "part of type image holds"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "../x"}]}]}, "must be relative"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "/x"}]}]}, "must be relative"),
    ],
)
def test_row_against_the_schema_is_refused_and_nothing_is_written(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        write_rows(tmp_path / "t.parquet", [row("good"), {**row("bad"), **changes}], system_hash="")
    assert os.listdir(tmp_path) == []


def test_repeated_id_is_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "t.parquet"
    write(path)
    old = path.read_bytes()
    with pytest.raises(DataError, match="'a': this id stands in the file twice"):
        write_rows(path, [row("a"), row("a")], system_hash="")
    assert path.read_bytes() == old and json.loads(summary_path(path).read_text())["rows"] == 3


def test_no_rows_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no row to write"):
        write_rows(tmp_path / "t.parquet", [], system_hash="")
    assert os.listdir(tmp_path) == []


def test_full_disk_is_a_data_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(DataError, match="cannot be written: No space left"):
        write(tmp_path / "t.parquet")
    assert os.listdir(tmp_path) == []


def test_d3_pyarrow_reads_a_nested_row(tmp_path):
    write(tmp_path / "t.parquet", 1)
    assert isinstance(pq.read_table(tmp_path / "t.parquet").column("messages").type, pa.ListType)
    assert RowFile(tmp_path / "t.parquet")[0].messages[0].content[2].text == "r0"
