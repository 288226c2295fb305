"""Several files as one sequence of rows, and what is known of rows without reading their media."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnitrain.data.files import RowFiles
from omnitrain.data.schema import RowFile, write_rows
from omnitrain.errors import DataError


def row(name, kinds=(), source="s", **columns):
    content = [{"type": kind, "data": b"x" * 1000} for kind in kinds] + [{"type": "text", "text": name}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be good."}]},
        {"role": "user", "content": content},
    ]
    return {"id": name, "messages": messages, "source": source, **columns}


def write(path, rows):
    write_rows(path, rows, system_hash="")
    return path


@pytest.fixture
def two(tmp_path):
    first = write(tmp_path / "a" / "first.parquet", [row("a0"), row("a1", ["image"], chosen="x", rejected="x")])
    second = [row("b0", ["audio", "image"], "t"), row("b1", ["video"], chosen="x", rejected="y"), row("b2")]
    return [first, write(tmp_path / "b" / "second.parquet", second)]


def test_rows_of_several_files_are_counted_through_and_keep_their_own_folder(two):
    rows = RowFiles(two)
    assert (len(rows), rows.ids) == (5, ["a0", "a1", "b0", "b1", "b2"])
    assert [(r.id, r.index, r.root.name) for r in rows] == [
        ("a0", 0, "a"), ("a1", 1, "a"), ("b0", 2, "b"), ("b1", 3, "b"), ("b2", 4, "b")
    ]  # fmt: skip
    assert rows.ranges == [range(0, 2), range(2, 5)] and rows.paths == two and rows.path == f"{two[0]}, {two[1]}"
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            rows[outside]


def test_sources_modalities_and_ties_are_known_without_reading_media(two, monkeypatch):
    rows = RowFiles(two)
    monkeypatch.setattr(RowFile, "_group", None)  # what decodes whole rows
    assert rows.modalities == ["text", "image", "image+audio", "video", "text"]
    assert rows.sources == Counter(s=4, t=1)
    assert rows.ties() == [1]
    assert rows.column("chosen") == [None, "x", None, "x", None]


@given(st.lists(st.sets(st.sampled_from(["image", "audio", "video"])), min_size=1, max_size=8))
def test_the_modalities_read_from_the_columns_are_the_rows_own(tmp_path_factory, kinds):
    path = tmp_path_factory.mktemp("m") / "m.parquet"
    rows = RowFile(write(path, [row(f"r{number}", sorted(found)) for number, found in enumerate(kinds)]))
    assert rows.modalities == [r.modality for r in rows]


def test_the_first_row_without_a_column_is_named_with_its_file(two):
    rows = RowFiles(two)
    assert rows.first_without("chosen", "answer") == f"{two[0]}: row a0"
    assert RowFiles(two[1:]).first_without("chosen") == f"{two[1]}: row b0"
    assert rows.first_without("id") is None


def test_an_id_in_two_files_names_both(two, tmp_path):
    other = write(tmp_path / "other.parquet", [row("c0"), row("b1")])
    with pytest.raises(DataError, match=r"row 'b1' stands in .*second\.parquet and in .*other\.parquet; leave"):
        RowFiles([*two, other])


def test_the_digest_is_that_of_the_content_and_of_the_order(two, tmp_path):
    digest = RowFiles(two).digest()
    assert RowFiles(two).digest() == digest != RowFiles(two[::-1]).digest()
    write(two[0], [row("a0"), row("a1", ["image"], chosen="x", rejected="z")])
    assert RowFiles(two).digest() != digest
