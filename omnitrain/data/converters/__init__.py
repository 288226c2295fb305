"""From published data sets to rows: a converter parses records, `convert` checks their media and writes.

A converter is one file here and one line in CONVERTERS. It yields, for each record of a split, a row
by the schema or a Dropped with its reason; media paths in the row are relative to the split's `root`,
and media that the data set holds inline come as `data`.

Where the files go, for a split named `train`:

    OUT/train.parquet          the rows
    OUT/train.summary.json     their counts, readable without pyarrow
    OUT/train.dropped.jsonl    id, reason and detail of every dropped record; absent when none was
    OUT/media/train/...        hard links to the media (copies, where OUT is on another file system);
                               inline media become files named by their SHA-256

Media that already lie inside OUT stay where they are. Rows come first into memory, and nothing but
the dropped ids is written before every record of every split has been checked; inline media wait in a
hidden folder beside OUT until then.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omnitrain.errors import DataError

CONVERTERS = {
    "gsm8k": "omnitrain.data.converters.gsm8k",
    "mmk12": "omnitrain.data.converters.mmk12",
    "avqa": "omnitrain.data.converters.avqa",
    "nextqa": "omnitrain.data.converters.nextqa",
    "omni-preference": "omnitrain.data.converters.omni_preference",
}
"""Name -> module; the module holds `converter`."""

HELD_OUT = 0.1
"""Share of the rows that become the validation split of a data set published without one."""


@dataclass(frozen=True)
class Split:
    """One split of a data set as published."""

    name: str
    """Names the output: "train", "validation", "test", or what the files are called."""
    files: tuple[Path, ...]
    root: Path
    """The folder that media paths are relative to, and may not leave."""


@dataclass(frozen=True)
class Dropped:
    """A record that gives no row."""

    id: str
    reason: str
    detail: str = ""


class Converter(Protocol):
    """What a module of this package offers as `converter`."""

    name: str
    system: str
    """The system instruction of every row; empty where none is published."""
    held_out: bool
    """The data set has no published validation split: one is cut off by a hash of the media."""

    def splits(self, inputs: list[Path]) -> list[Split]:
        """The splits in what the user named. DataError if there is none."""

    def records(self, split: Split) -> Iterator[dict[str, Any] | Dropped]:
        """A row or a Dropped per record. DataError if a file cannot be read at all."""


@dataclass
class SplitReport:
    """What became of one split."""

    name: str
    path: Path
    """The parquet file, written or not."""
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_records: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: bool = False

    @property
    def input(self) -> int:
        return self.kept + len(self.dropped_records)


@dataclass
class Report:
    """What became of a data set."""

    splits: list[SplitReport]
    files: list[Path] = field(default_factory=list)
    """Every file written, media apart."""
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(split.kept for split in self.splits)

    @property
    def dropped(self) -> Counter[str]:
        return sum((split.dropped for split in self.splits), Counter())

    @property
    def bad(self) -> int:
        return self.dropped.total()


def load_converter(name: str) -> Converter:
    """The converter of a name in CONVERTERS."""
    return importlib.import_module(CONVERTERS[name]).converter


def turn(role: str, *content: dict[str, Any] | str) -> dict[str, Any]:
    """One message; a string is a text part."""
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]}


def convert(
    name: str,
    inputs: list[Path],
    out: Path,
    *,
    skip_bad: bool = False,
    workers: int = 1,
    validation: float = HELD_OUT,
    seed: int = 0,
) -> Report:
    """Convert a data set into `out`.

    When a record was dropped and `skip_bad` is not set, no parquet file is written: the report and the
    list of dropped ids are all there is. workers: processes that open media files; 1 opens them in this one.
    validation, seed: the share that is held out where no validation split is published, and its draw.
    Raises DataError when an input cannot be read, a worker dies, or `out` cannot be written.
    """
    from omnitrain.data.converters.checking import Stash, check, media_notes
    from omnitrain.data.converters.placing import placed_media
    from omnitrain.data.converters.splitting import hold_out, shared_media
    from omnitrain.data.schema import system_hash, write_rows

    for path in inputs:
        if not path.exists():
            raise DataError(f"{path}: no such file or directory")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; OUT must be a directory")
    converter = load_converter(name)
    try:
        with Stash(out) as stash:
            checked = [
                check(split, converter.records(split), out, stash, workers) for split in converter.splits(inputs)
            ]
            if converter.held_out:
                checked = [part for split in checked for part in hold_out(split, validation, seed)]
            out.mkdir(parents=True, exist_ok=True)
            report = Report([part.report for part in checked], notes=shared_media(checked))
            for part in checked:
                part.report.notes += media_notes(part)
                report.files += _write_dropped(part.report)
            if report.bad and not skip_bad:
                return report
            for part in checked:
                if not part.rows:
                    continue
                given, dropped = part.report.input, dict(sorted(part.report.dropped.items()))
                counts = {"converter": name, "input": given, "dropped": dropped}
                with placed_media(part, out, stash) as rows:
                    write_rows(part.report.path, rows, system_hash=system_hash(converter.system), extra=counts)
                part.report.written = True
                report.files.append(part.report.path)
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror or error}") from error
    return report


def _write_dropped(report: SplitReport) -> list[Path]:
    from omnitrain.data.schema import write_text

    path = report.path.with_suffix(".dropped.jsonl")
    if not report.dropped_records:
        path.unlink(missing_ok=True)
        return []
    lines = [json.dumps(vars(record), ensure_ascii=False) for record in report.dropped_records]
    # Half a surrogate pair becomes its JSON escape: a list of what was wrong takes any text.
    write_text(path, "\n".join(lines).encode("utf-8", "backslashreplace").decode() + "\n")
    return [path]
