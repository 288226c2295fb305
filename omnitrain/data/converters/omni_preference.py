"""Omni-Preference as published: a picture, a sound or a video, a question, two answers and a verdict.

Input is the folder of the data set (or the one it is in), or single JSON lines files of it:

    dataset_jsonl/{image,audio,video}/final_rl_data.jsonl
    rlaif-v-dataset/...                  pictures, by their path
    audio_files/.../NAME.wav             sounds, by the file's name alone
    video-dataset/academic_source/...    videos, by their path

A record's `messages` hold a judge's instruction that ends in a block

    ### Context
    Image file: /data/rlaif-v-dataset/....jpg
    Question: ...
    Candidate A: ...
    Candidate B: ...

and its `solution` is JSON with score_A, score_B and better ("A", "B" or "equal"). The row is the media and the
question; `chosen` and `rejected` are the candidates in the order of the verdict, which the scores must bear
out. No split is published: a share of the media is held out (`--validation-share`, `--seed`). There is no
published system instruction, so rows have none.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from omnitrain.data.converters import Dropped, Split, turn
from omnitrain.data.converters.nextqa import VIDEO_SUFFIXES
from omnitrain.data.converters.text import ENCODING, parse_json
from omnitrain.errors import DataError

FOLDERS = {"image": "rlaif-v-dataset", "audio": "audio_files", "video": "video-dataset"}
"""Kind of media -> its folder in the data set."""
_TABLE = "dataset_jsonl/*/final_rl_data.jsonl"
_LABELS = ("Question:", "Candidate A:", "Candidate B:")
_FILE = re.compile(r"(Image|Audio|Video) file:", re.IGNORECASE)


class OmniPreference:
    name = "omni-preference"
    held_out = True
    system = ""

    def splits(self, inputs: list[Path]) -> list[Split]:
        files: list[Path] = []
        for path in inputs:
            found = [path] if path.is_file() else sorted(path.glob(_TABLE)) or sorted(path.glob(f"*/{_TABLE}"))
            if not found:
                raise DataError(f"{path}: no Omni-Preference data here; expected {_TABLE} below it")
            files += [file for file in found if file not in files]
        for file in files:
            if file.parent.name not in FOLDERS:
                raise DataError(f"{file}: its folder must be named image, audio or video, for what the pairs are about")
        roots = sorted({file.resolve().parents[2] for file in files})
        if len(roots) > 1:
            raise DataError(f"files of {len(roots)} data sets ({roots[0]}, {roots[1]}); convert them one by one")
        return [Split("train", tuple(files), roots[0])]

    def records(self, split: Split) -> Iterator[dict[str, Any] | Dropped]:
        for path in split.files:
            kind = path.parent.name
            media = _Media(split.root, kind)
            for index, record in enumerate(_json_lines(path)):
                yield self._row(f"omni-preference-{kind}-{index}", record, media)

    def _row(self, name: str, record: Any, media: _Media) -> dict[str, Any] | Dropped:
        if not isinstance(record, dict):
            return Dropped(name, "invalid record", "not a JSON object")
        context = parse_context(_instruction(record))
        if isinstance(context, str):
            return Dropped(name, "context does not parse", context)
        if context["kind"] != media.kind:
            return Dropped(name, "context does not parse", f"it names a file of kind {context['kind']}")
        verdict = parse_verdict(record.get("solution"))
        if isinstance(verdict, Dropped):
            return Dropped(name, verdict.reason, verdict.detail)
        answers = {"A": context["Candidate A:"], "B": context["Candidate B:"]}
        if answers["A"] == answers["B"]:
            return Dropped(name, "identical candidates")
        given = _named_media(record, media.kind, context["file"])
        if given is None:
            return Dropped(name, f"missing {media.kind}", f"{media.kind}s does not name one file")
        winner, loser = ("A", "B") if verdict["better"] == "A" else ("B", "A")
        return {
            "id": name,
            "messages": [turn("user", {"type": media.kind, "path": media.path(given)}, context["Question:"])],
            "chosen": answers[winner],
            "rejected": answers[loser],
            "source": "omni-preference",
            "meta": {"chosen_score": verdict[winner], "rejected_score": verdict[loser], "media": given},
        }


class _Media:
    """Where files of one kind lie, relative to the data set's folder."""

    def __init__(self, root: Path, kind: str) -> None:
        self.kind = kind
        self._root = root
        self._sounds: dict[str, str] = {}
        if kind == "audio":
            # Shortest path first: of two files of one name, the one that is less deep.
            files = sorted((root / FOLDERS[kind]).rglob("*"), key=lambda p: (len(p.parts), str(p)), reverse=True)
            for file in files:
                self._sounds[_folded(file.name)] = file.relative_to(root).as_posix()
            self._sounds |= {file.name: file.relative_to(root).as_posix() for file in files}

    def path(self, given: str) -> str:
        """The file that a record's path stands for; it need not exist."""
        there, folder = PurePosixPath(given.replace("\\", "/")), FOLDERS[self.kind]
        if self.kind == "audio":
            name = there.name
            return self._sounds.get(name) or self._sounds.get(_folded(name)) or f"{folder}/{name}"
        parts = there.parts
        if folder in parts:
            parts = parts[parts.index(folder) + 1 :]
        else:  # published paths are absolute on another machine, some without the data set's folder
            parts = parts[1:] if there.is_absolute() else parts
            parts = parts[1:] if parts[:1] == ("data",) else parts
        path = "/".join([folder, *parts])
        if self.kind == "video" and not PurePosixPath(path).suffix:
            existing = (path + suffix for suffix in VIDEO_SUFFIXES if (self._root / (path + suffix)).is_file())
            return next(existing, path)
        return path


def _folded(name: str) -> str:
    """Published names differ from the files' in escapes and in what stands for a space."""
    return html.unescape(name).replace("_", " ").strip().casefold()


def _instruction(record: dict[str, Any]) -> str:
    """The text of the record's messages that holds the Context block; empty where none does."""
    messages = record.get("messages")
    texts = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return next((text for text in texts if isinstance(text, str) and "### Context" in text), "")


def parse_context(text: str) -> dict[str, str] | str:
    """The Context block as kind, file, and a text for each label; or what is wrong with it."""
    _, heading, block = text.partition("### Context")
    if not heading:
        return "no ### Context in the messages"
    start = _FILE.search(block)
    if start is None or block[: start.start()].strip():
        return "it does not begin with Image file:, Audio file: or Video file:"
    ends = [start.end()]
    for label in _LABELS:
        found = [m.start() for m in re.finditer(rf"(?<=\s){label}", block) if m.start() >= ends[-1]]
        if not found:
            return f"no {label} where one is due"
        # A question may hold the word "Question:"; a second mark of a candidate leaves its answer's end open.
        if len(found) > 1 and label != "Question:":
            return f"{label} stands there {len(found)} times"
        ends.append(found[0] + len(label))
    cuts = [end - len(label) for end, label in zip(ends[1:], _LABELS, strict=True)] + [len(block)]
    names = ("file", *_LABELS)
    texts = {name: block[begin:end].strip() for name, begin, end in zip(names, ends, cuts, strict=True)}
    if empty := next((name for name, value in texts.items() if not value), None):
        return f"nothing after {empty}"
    return {"kind": start[1].lower(), **texts}


def parse_verdict(solution: Any) -> dict[str, Any] | Dropped:
    """`better` and the scores by candidate; or the reason and detail of a Dropped without id."""
    if isinstance(solution, str):
        try:
            solution = parse_json(solution)
        except json.JSONDecodeError as error:
            return Dropped("", "invalid solution", f"not JSON: {error.msg}")
    if not isinstance(solution, dict):
        return Dropped("", "invalid solution", f"a {type(solution).__name__}, not an object")
    better = solution.get("better")
    if better not in ("A", "B", "equal"):
        return Dropped("", "invalid solution", f"better is {better!r}, not A, B or equal")
    scores = {letter: _number(solution.get(f"score_{letter}")) for letter in "AB"}
    if None in scores.values():
        return Dropped("", "invalid solution", "score_A and score_B must be numbers")
    if better == "equal" or scores["A"] == scores["B"]:
        return Dropped("", "no strict winner", f"better {better}, scores {scores['A']:g} and {scores['B']:g}")
    if better != max(scores, key=scores.get):
        detail = f"better {better}, scores {scores['A']:g} and {scores['B']:g}"
        return Dropped("", "scores contradict the verdict", detail)
    return {"better": better, **scores}


def _number(value: Any) -> float | None:
    """A finite number, also one written as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # an integer beyond what a float can hold
        return None
    return number if math.isfinite(number) else None


def _named_media(record: dict[str, Any], kind: str, context_file: str) -> str | None:
    """The path in the record's list of media, else in its Context block; None if the list does not hold one."""
    listed = record.get(f"{kind}s")
    if listed is None:
        return context_file.rstrip("_") or None  # the block's paths trail underscores at times
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str) or not listed[0].strip():
        return None
    return listed[0].strip()


def _json_lines(path: Path) -> Iterator[Any]:
    """Records; None for a line that is no JSON."""
    try:
        lines = path.read_text(encoding=ENCODING).split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a UTF-8 text file (byte {error.start}); JSON lines were expected") from error
    for line in lines:
        if line.strip():
            try:
                yield parse_json(line)
            except json.JSONDecodeError:
                yield None


converter = OmniPreference()
