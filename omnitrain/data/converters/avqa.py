"""AVQA-R1-6K as published: a picture, a sound, a question with options A to H.

Input is the folder that holds AVQA_R1, AVQA_R1 itself, or a split's JSON file:

    AVQA_R1/train/omni_rl_format_train.json     a list of records
    AVQA_R1/train/images/..., audios/...        named relative to the JSON file
    AVQA_R1/valid/omni_rl_format_valid.json

A record holds problem, data_type "image_audio", options ["A. ...", ...], solution "<answer>B</answer>"
and path {image, audio}. `valid` becomes validation.parquet; further splits keep their names. `answer`
is the solution with its tag, which is how the choice reward reads a label. The published splits stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omnitrain.data.converters import Dropped, Split, turn
from omnitrain.data.converters.text import ENCODING, parse_json
from omnitrain.errors import DataError

LETTERS = "ABCDEFGH"
_FILE = re.compile(r"omni_rl_format_(\w+)\.json")
_OPTION = re.compile(r"\s*([A-Za-z])\s*[.):\u3001\uff1a]\s*(.*?)\s*", re.DOTALL)
_SOLUTION = re.compile(r"\s*<answer>\s*([A-Za-z])\s*</answer>\s*")
_NAMES = {"valid": "validation", "val": "validation"}


class Avqa:
    name = "avqa"
    held_out = False
    system = (
        "You are given an image, a sound and a question with lettered options. Look and listen closely, and reason "
        "as a person would: think aloud, question your first impression, check it. Write the reasoning between "
        "<think> and </think>, then only the letter of the right option between <answer> and </answer>."
    )

    def splits(self, inputs: list[Path]) -> list[Split]:
        found: dict[str, Path] = {}
        for path in inputs:
            files = [path] if path.is_file() else _find(path)
            if not files:
                raise DataError(
                    f"{path}: no AVQA data here; expected AVQA_R1/train/omni_rl_format_train.json below it "
                    "(name the folder that holds AVQA_R1, or AVQA_R1 itself)"
                )
            for file in files:
                match = _FILE.fullmatch(file.name)
                published = match[1] if match else file.stem
                name = _NAMES.get(published, published)
                if name in found:
                    raise DataError(f"{file}: a second file for split {name}; the first is {found[name]}")
                found[name] = file
        order = sorted(found, key=lambda name: (name != "train", name != "validation", name))
        return [Split(name, (found[name],), found[name].parent) for name in order]

    def records(self, split: Split) -> Iterator[dict[str, Any] | Dropped]:
        for index, record in enumerate(_read_list(split.files[0])):
            yield self._row(f"avqa-{split.name}-{index}", record)

    def _row(self, name: str, record: Any) -> dict[str, Any] | Dropped:
        if not isinstance(record, dict):
            return Dropped(name, "invalid record", f"a {type(record).__name__}, not an object")
        problem = record.get("problem")
        if not isinstance(problem, str) or not problem.strip():
            return Dropped(name, "empty problem")
        if record.get("data_type") != "image_audio":
            return Dropped(name, "unsupported modality", f"data_type {record.get('data_type')!r}")
        options = _options(record.get("options"))
        if isinstance(options, str):
            return Dropped(name, "invalid options", options)
        solution = record.get("solution")
        match = _SOLUTION.fullmatch(solution) if isinstance(solution, str) else None
        if match is None:
            return Dropped(name, "invalid solution", f"{solution!r} is not <answer>X</answer>")
        letter = match[1].upper()
        if letter not in LETTERS[: len(options)]:
            return Dropped(name, "invalid solution", f"{letter} is not one of the {len(options)} options")
        paths = record.get("path")
        if not isinstance(paths, dict):
            return Dropped(name, "invalid record", "path is not an object")
        for kind in ("image", "audio"):
            if not isinstance(paths.get(kind), str) or not paths[kind].strip():
                return Dropped(name, f"missing {kind}", f"path.{kind} is {paths.get(kind)!r}")
        lines = [f"{key}. {text}" for key, text in zip(LETTERS, options, strict=False)]
        media = [{"type": kind, "path": paths[kind].strip()} for kind in ("image", "audio")]
        return {
            "id": name,
            "messages": [
                turn("system", self.system),
                turn("user", *media, "\n".join([problem.strip(), *lines])),
            ],
            "answer": f"<answer>{letter}</answer>",
            "source": "avqa",
            "meta": {key: record[key] for key in ("problem_id", "problem_type", "data_source") if key in record},
        }


def _find(folder: Path) -> list[Path]:
    """The split files one or two levels below a folder, or in it."""
    for pattern in ("omni_rl_format_*.json", "*/omni_rl_format_*.json", "*/*/omni_rl_format_*.json"):
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def _read_list(path: Path) -> list[Any]:
    try:
        records = parse_json(path.read_text(encoding=ENCODING))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a UTF-8 text file (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    if not isinstance(records, list):
        raise DataError(f"{path}: expected a JSON list of records, found {type(records).__name__}")
    return records


def _options(options: Any) -> list[str] | str:
    """The options' texts in order, or what is wrong with them."""
    if not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
        return (
            f"2 to {len(LETTERS)} options are needed, found {len(options) if isinstance(options, list) else 'no list'}"
        )
    texts: list[str] = []
    for expected, option in zip(LETTERS, options, strict=False):
        match = _OPTION.fullmatch(option) if isinstance(option, str) else None
        if match is None:
            return f"{option!r} is not a letter, a full stop and a text"
        letter, text = match[1].upper(), match[2]
        if letter in LETTERS[: len(texts)]:
            return f"the letter {letter} is repeated"
        if letter != expected:
            return f"letter {letter} where {expected} is due"
        if not text:
            return f"option {letter} is empty"
        texts.append(text)
    return texts


converter = Avqa()
