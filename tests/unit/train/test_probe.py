"""Which rows the gates look at. Real row files; prompts without a model, of which only the media matter here."""

from types import SimpleNamespace

import pytest

from omnitrain.data.files import RowFiles
from omnitrain.data.schema import system_hash, write_rows
from omnitrain.errors import DataError
from omnitrain.train.probe import ROWS_PER_KIND, SOURCES, TRIES, choose
from omnitrain.train.prompts import PromptSource

ALONE = SimpleNamespace(rank=0, world=1, gather=lambda value: [value])
SOUND, SILENT = "video with sound", "video without sound"


class Listening:
    """Encodes rows of which `heard` have a sound track, and counts how many it was asked for."""

    def __init__(self, heard=(), long=()):
        self.heard, self.long, self.asked = set(heard), set(long), 0

    def encode(self, row):
        self.asked += 1
        sounds = [part for message in row.messages for part in message.content if part.type == "audio"]
        media = {"audio": [*sounds, *(["track"] if row.id in self.heard else [])]}
        return SimpleNamespace(row=row, media=media)


@pytest.fixture
def source(tmp_path):
    """source(rows, ...) of rows given as (media types, source, meta) -> a prompt source over one file a list."""

    def make(*files, heard=(), long=()):
        paths, number = [], 0
        for rows in files:
            written = []
            for types, name, meta in rows:
                content = [{"type": kind, "data": b"0"} for kind in types] + [{"type": "text", "text": "?"}]
                messages = [{"role": "user", "content": content}]
                written.append({"id": str(number), "messages": messages, "source": name, "meta": meta, "answer": "A"})
                number += 1
            paths.append(tmp_path / f"{len(paths)}.parquet")
            write_rows(paths[-1], written, system_hash=system_hash(None))
        misfit = lambda prompt: "too long" if prompt.row.id in long else None  # noqa: E731
        return PromptSource(RowFiles(paths), Listening(heard), ALONE, "drop", misfit=misfit)

    return make


TEXT, VIDEO = ((), "a", {}), (("video",), "a", {})


def test_rows_of_every_kind_are_found_wherever_they_are_and_few_are_opened(source):
    rows = [TEXT] * 1500 + [(("image",), "a", {})] + [TEXT] * 500 + [(("image", "audio"), "a", {})] * 3
    given = source(rows)
    found = choose(given, tracks=True)
    assert sorted(found.kinds.values()) == ["image"] + ["image+audio"] * 2 + ["text"] * 2
    assert found.rows == sorted(found.rows) and 1500 in found.rows and not found.missing
    assert given._processing.asked <= 12


def test_q3_videos_with_and_without_a_track_are_kinds_of_their_own_where_tracks_are_heard(source):
    rows = [(("video",), "a", {"sound_track": False})] * 500 + [(("video",), "a", {"sound_track": True})] * 2
    given = source(rows, heard=("500", "501"))
    assert sorted(choose(given, tracks=True).kinds.values()) == [SOUND] * 2 + [SILENT] * 2
    assert given._processing.asked <= 12
    assert list(choose(given, tracks=False).kinds.values()) == ["video"] * 2


def test_q3_videos_that_do_not_tell_are_opened_until_both_kinds_are_found(source):
    given = source([VIDEO] * 20, heard=("3", "17"))
    assert sorted(choose(given, tracks=True).kinds.values()) == [SOUND] * 2 + [SILENT] * 2
    many = source([VIDEO] * 500)
    assert list(choose(many, tracks=True).kinds.values()) == [SILENT] * ROWS_PER_KIND
    assert many._processing.asked <= TRIES + 2 * ROWS_PER_KIND + TRIES  # a fit, then its kind; kept prompts are cached


def test_every_source_of_every_file_has_a_row_up_to_a_bound(source):
    given = source([TEXT] * 50, [((), "b", {})] * 30 + [((), "c", {})])
    found = choose(given, tracks=False)
    assert set(found.sources.values()) == {"a", "b", "c"} and len(found.rows) <= 4 and not found.missing
    crowd = choose(source([((), f"s{index}", {}) for index in range(40)]), tracks=False)
    assert len(crowd.rows) == SOURCES and crowd.missing[0].endswith(f"and {40 - SOURCES - 3} more")


def test_rows_that_do_not_fit_are_passed_over_and_a_kind_without_one_is_named(source):
    given = source([TEXT] * 3 + [VIDEO] * 2, long=("0", "3", "4"))
    found = choose(given, tracks=False)
    assert list(found.kinds) == [1, 2]
    assert found.missing == ("no video row: none of 2 fits into data.max_prompt_tokens",)
    with pytest.raises(DataError, match="none of 1 rows fits into data.max_prompt_tokens; raise it"):
        choose(source([TEXT], long=("0",)), tracks=False)
