"""GSM8K as published: `question`, and `answer` ending in `#### N`; JSON lines or the hub's parquet files.

The split is read off the file's name: gsm8k_test.jsonl and test-00000-of-00001.parquet are `test`,
several files of one split are joined, a name that holds no split is kept (my_questions.jsonl ->
my_questions.parquet). `answer` is the number with its commas removed; the worked solution is in
`meta.solution`. Ids count from 0 in the order of the files.

The instruction is the one the published recipe puts after the question, in our words and as the
system turn, so that `data.system` can replace it.
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

_SPLITS = {
    "train": "train",
    "test": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
_ANSWER = re.compile(r"####\s*(.*?)\s*$")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d+)?|\.\d+)")


class Gsm8k:
    name = "gsm8k"
    held_out = False
    system = 'Solve the problem step by step. End with the final answer, a number, on its own line after "####".'

    def splits(self, inputs: list[Path]) -> list[Split]:
        found: dict[str, list[Path]] = {}
        for path in inputs:
            if path.is_dir():
                inside = sorted(
                    p.relative_to(path).as_posix() for p in path.rglob("*") if p.suffix in (".jsonl", ".parquet")
                )
                raise DataError(
                    f"{path}: is a directory; name its files ({', '.join(inside[:4]) or 'no .jsonl or .parquet there'})"
                )
            found.setdefault(split_of(path), []).append(path)
        return [Split(name, tuple(files), files[0].parent) for name, files in found.items()]

    def records(self, split: Split) -> Iterator[dict[str, Any] | Dropped]:
        index = 0
        for path in split.files:
            for where, record in _parquet(path) if path.suffix == ".parquet" else _json_lines(path):
                yield self._row(f"gsm8k-{split.name}-{index}", f"{path.name}:{where}", record)
                index += 1

    def _row(self, name: str, where: str, record: Any) -> dict[str, Any] | Dropped:
        if not isinstance(record, dict):
            return Dropped(name, "invalid record", f"{where}: not a JSON object")
        question, solution = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not question.strip():
            return Dropped(name, "empty question", where)
        match = _ANSWER.search(solution) if isinstance(solution, str) else None
        if match is None:
            return Dropped(name, "missing answer", f"{where}: the answer does not end in #### N")
        number = match[1].replace(",", "").removeprefix("$")
        if not _NUMBER.fullmatch(number):
            return Dropped(name, "invalid answer", f"{where}: {match[1]!r} is not a number")
        return {
            "id": name,
            "messages": [turn("system", self.system), turn("user", question.strip())],
            "answer": number,
            "source": "gsm8k",
            "meta": {"solution": solution},
        }


def split_of(path: Path) -> str:
    """The split a file's name speaks of, or its stem."""
    words = re.split(r"[^a-z]+", path.stem.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), path.stem)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_text(encoding=ENCODING).split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not a UTF-8 text file (byte {error.start}); gsm8k takes .jsonl or .parquet"
        ) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{number}", parse_json(line)
            except json.JSONDecodeError as error:
                yield f"{number}:{error.colno}", None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        missing = {"question", "answer"} - set(file.schema_arrow.names)
        if missing:
            raise DataError(
                f"{path}: no column {', '.join(sorted(missing))}; it has {', '.join(file.schema_arrow.names)}"
            )
        number = 0
        for batch in file.iter_batches(columns=["question", "answer"]):
            for record in batch.to_pylist():
                yield f"row {number}", record
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file") from error


converter = Gsm8k()
