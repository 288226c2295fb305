"""MMK12 as published: a picture, a question of school mathematics or science, a short answer.

Input is the folder of the hub's shards (`train-*.parquet`, `test-*.parquet`, at any depth), or shards by
name; several shards of a split are joined in the order of their names. A shard has the columns id,
question, answer and image (bytes, or the hub's {bytes, path}), and usually subject.

The pictures become files under OUT/media, named by their SHA-256: rows are drawn at random in training,
and a row group full of pictures would be read for each. `answer` is the answer as published, a letter, a
number or a formula. Where it is the letter of an option, `meta.options` holds the options by letter, so
that a reward can take a choice by its letter or by its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omnitrain.data.converters import Dropped, Split, turn
from omnitrain.data.converters.gsm8k import split_of
from omnitrain.errors import DataError

_SHARD = re.compile(r"(train|test|validation|val|valid|dev)-.*\.parquet")
_COLUMNS = ("id", "question", "answer", "subject", "image")
_NEEDED = ("question", "answer", "image")
_BATCH = 64
"""Pictures in memory at once."""
# A letter and a mark, at the start of the text, of a line, or after a space: options may share a line.
_OPTION = re.compile(r"(?:^|(?<=\s))\(?([A-H])\s*[.):\u3001\uff0e\uff1a\uff09]\s*")


class Mmk12:
    name = "mmk12"
    held_out = False
    system = (
        "Solve the problem about the image. Reason step by step first. Then give the final answer between <answer> "
        "and </answer>, with the result itself, in LaTeX where it is a formula, inside \\boxed{}: "
        "<answer>The answer is $\\boxed{2}$</answer>."
    )

    def splits(self, inputs: list[Path]) -> list[Split]:
        found: dict[str, list[Path]] = {}
        for path in inputs:
            shards = [path] if path.is_file() else sorted(p for p in path.rglob("*.parquet") if _SHARD.match(p.name))
            if not shards:
                raise DataError(f"{path}: no MMK12 shard here; expected train-*.parquet or test-*.parquet in it")
            for shard in shards:
                if shard not in (files := found.setdefault(split_of(shard), [])):
                    files.append(shard)
        return [Split(name, tuple(files), files[0].parent) for name, files in found.items()]

    def records(self, split: Split) -> Iterator[dict[str, Any] | Dropped]:
        index = 0
        for path in split.files:
            for record in _read(path):
                yield self._row(f"mmk12-{split.name}-{index}", f"{path.name}, id {record.get('id')!r}", record)
                index += 1

    def _row(self, name: str, where: str, record: dict[str, Any]) -> dict[str, Any] | Dropped:
        question, answer, image = record["question"], record["answer"], record["image"]
        if not isinstance(question, str) or not question.strip():
            return Dropped(name, "empty question", where)
        if answer is None or not str(answer).strip():
            return Dropped(name, "missing answer", where)
        if not isinstance(answer, (str, int, float)):
            return Dropped(name, "invalid answer", f"{where}: a {type(answer).__name__}")
        data = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(data, bytes):
            return Dropped(name, "missing image", where)
        meta = {key: record[key] for key in ("id", "subject") if record.get(key) is not None}
        choices = options(question)
        if str(answer).strip() in choices:
            meta["options"] = choices
        return {
            "id": name,
            "messages": [turn("system", self.system), turn("user", {"type": "image", "data": data}, question.strip())],
            "answer": str(answer).strip(),
            "source": "mmk12",
            "meta": meta,
        }


def options(question: str) -> dict[str, str]:
    """The choices that a question lists, by letter from A on without a gap; empty where there are not two."""
    runs: list[list[re.Match[str]]] = [[]]
    for mark in _OPTION.finditer(question):
        if mark[1] == "A":
            runs.append([mark])  # an A before may have been a point or a set of the problem
        elif runs[-1] and ord(mark[1]) == ord(runs[-1][-1][1]) + 1:
            runs[-1].append(mark)
    marks = max(reversed(runs), key=len)
    ends = [mark.start() for mark in marks[1:]] + [len(question)]
    texts = [question[mark.end() : end].strip().rstrip(";,\uff1b").rstrip() for mark, end in zip(marks, ends)]
    return dict(zip("ABCDEFGH", texts)) if len(texts) > 1 and all(texts) else {}


def _read(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        there = file.schema_arrow.names
        if missing := [name for name in _NEEDED if name not in there]:
            raise DataError(f"{path}: no column {', '.join(missing)}; it has {', '.join(there)}")
        for batch in file.iter_batches(batch_size=_BATCH, columns=[name for name in _COLUMNS if name in there]):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        first = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable parquet file ({first})") from error


converter = Mmk12()
