"""NExT-QA (multiple choice) as published: questions in CSV files, five options each, about short videos.

Inputs are CSV files and folders, in any number. Tables are the CSV files named or, when none is, those with
the columns below in the folders or one level below them. Videos are looked for in the folder named or, when
none is, in the folder of the table.

    train.csv, val.csv, test.csv    video, frame_count, width, height, question, answer, qid, type, a0..a4
    map_vid_vidorID.json            optional: video id -> path without suffix, "1164/3238737531"
    NExTVideo/1164/3238737531.mp4   at any depth, under any name of folder

A video is found by its id as the file's name; the map decides where two files have that name. `answer` in
the CSV is the index of the right option; in the row it is "<answer>B</answer>", which is how the choice
reward reads a label. `meta` has video, qid, type ("CW"), category (its first letter: C causal, T temporal,
D descriptive) and sound_track. `val` becomes validation.parquet; the published splits stay.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from omnitrain.data.converters import Dropped, Split, turn
from omnitrain.data.converters.gsm8k import split_of
from omnitrain.data.converters.text import ENCODING, parse_json
from omnitrain.errors import DataError

LETTERS = "ABCDE"
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi")
MAP = "map_vid_vidorID.json"
_OPTIONS = tuple(f"a{index}" for index in range(5))
_NEEDED = ("video", "question", "answer", "qid", "type", *_OPTIONS)


class NextQa:
    name = "nextqa"
    held_out = False
    system = (
        "You are given a video, with its sound where it has any, and a question with five lettered options. Look and "
        "listen closely. Write your reasoning between <think> and </think>, then only the letter of the right option "
        "between <answer> and </answer>, as in <answer>A</answer>."
    )

    def splits(self, inputs: list[Path]) -> list[Split]:
        folders = [path for path in inputs if path.is_dir()]
        files = [path for path in inputs if path.is_file()]
        files = files or [path for folder in folders for path in _tables(folder)]
        if not files:
            raise DataError(
                f"{inputs[0]}: no NExT-QA table here; expected train.csv, val.csv or test.csv in it, with the columns "
                f"{', '.join(_NEEDED)}"
            )
        folders = folders or sorted({path.parent for path in files})
        with_videos = [folder for folder in folders if any(_videos(folder))]
        if len(with_videos) > 1:
            raise DataError(
                f"videos stand in {len(with_videos)} of the folders ({with_videos[0]}, {with_videos[1]}); "
                "name one folder that holds them all"
            )
        found: dict[str, Path] = {}
        for file in files:
            if (name := split_of(file)) in found:
                raise DataError(f"{file}: a second table for split {name}; the first is {found[name]}")
            found[name] = file
        order = sorted(found, key=lambda name: (name != "train", name != "validation", name))
        return [Split(name, (found[name],), (with_videos or folders)[0]) for name in order]

    def records(self, split: Split) -> Iterator[dict[str, Any] | Dropped]:
        videos = _Videos(split)
        seen: Counter[tuple[str, str]] = Counter()
        for index, record in enumerate(_read(split.files[0])):
            if None in record or any(record[column] is None for column in _NEEDED):
                detail = "its number of fields is not that of the header"
                yield Dropped(f"nextqa-{split.name}-record-{index}", "invalid record", detail)
                continue
            seen[key := (record["video"].strip(), record["qid"].strip())] += 1
            name = f"nextqa-{split.name}-{key[0]}-{key[1]}"
            if seen[key] > 1:
                yield Dropped(f"{name}-{seen[key]}", "repeated question", "its video and qid stand in the table twice")
            else:
                yield self._row(name, record, videos)

    def _row(self, name: str, record: dict[str, str], videos: _Videos) -> dict[str, Any] | Dropped:
        if not record["question"].strip():
            return Dropped(name, "empty question")
        choices = [record[column].strip() for column in _OPTIONS]
        if not all(choices):
            return Dropped(name, "invalid options", f"option {LETTERS[choices.index('')]} is empty")
        if record["answer"].strip() not in {"0", "1", "2", "3", "4"}:
            return Dropped(name, "invalid answer", f"{record['answer']!r} is not the index of an option, 0 to 4")
        right = choices[int(record["answer"])]
        # Two wrong options that are alike do no harm, and the published tables have some.
        if choices.count(right) > 1:
            return Dropped(name, "invalid options", f"the right one, {right!r}, stands there twice")
        path = videos.find(record["video"].strip())
        if path is None:
            return Dropped(name, "missing video", f"{record['video']}: no such video below {videos.root}")
        kind = record["type"].strip()
        lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=True)]
        return {
            "id": name,
            "messages": [
                turn("system", self.system),
                turn("user", {"type": "video", "path": path}, "\n".join([record["question"].strip(), *lines])),
            ],
            "answer": f"<answer>{LETTERS[int(record['answer'])]}</answer>",
            "source": "nextqa",
            "meta": {"video": record["video"], "qid": record["qid"], "type": kind, "category": kind[:1]},
        }


class _Videos:
    """Video files by id, relative to the split's root."""

    def __init__(self, split: Split) -> None:
        self.root = split.root
        self._by_stem: dict[str, list[str]] = {}
        for path in sorted(_videos(split.root)):
            self._by_stem.setdefault(path.stem, []).append(path.relative_to(split.root).as_posix())
        places = [folder / MAP for folder in (split.files[0].parent, split.root)]
        file = next((place for place in places if place.is_file()), None)
        self._map = _read_map(file) if file else {}

    def find(self, video: str) -> str | None:
        mapped = self._map.get(video)
        paths = self._by_stem.get(video, []) + (self._by_stem.get(PurePosixPath(mapped).name, []) if mapped else [])
        if mapped:
            tail = PurePosixPath(mapped).parts
            for path in paths:
                if PurePosixPath(path).with_suffix("").parts[-len(tail) :] == tail:
                    return path
        return paths[0] if paths else None


def _videos(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix.lower() in VIDEO_SUFFIXES)


def _tables(folder: Path) -> list[Path]:
    """The CSV files with NExT-QA's columns in a folder, or one level below it."""
    for pattern in ("*.csv", "*/*.csv"):
        if tables := [path for path in sorted(folder.glob(pattern)) if set(_NEEDED) <= set(_header(path))]:
            return tables
    return []


def _header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        return next(csv.reader([file.readline()]), [])


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or [])]
            if missing:
                there = reader.fieldnames or []
                mark = next((mark for mark in ";\t|" if len(there) == 1 and mark in there[0]), None)
                if mark:
                    raise DataError(f"{path}: its columns are parted by {mark!r}; a CSV file with commas is expected")
                raise DataError(f"{path}: no column {', '.join(missing)}; it has {', '.join(there) or 'none'}")
            return list(reader)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a UTF-8 text file (byte {error.start}); nextqa takes .csv files") from error
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not a CSV table: {error}") from error


def _read_map(path: Path) -> dict[str, str]:
    try:
        found = parse_json(path.read_text(encoding=ENCODING))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise DataError(f"{path}: expected a JSON object of video ids and paths")
    return found


converter = NextQa()
