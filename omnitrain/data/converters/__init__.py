"""From published data sets to rows: a converter parses records, `convert` checks their media and writes.

A converter is one file here and one line in CONVERTERS. It yields, for each record of a split, a row
by the schema or a Dropped with its reason; media paths in the row are relative to the split's `root`.

Where the files go, for a split named `train`:

    OUT/train.parquet          the rows
    OUT/train.summary.json     their counts, readable without pyarrow
    OUT/train.dropped.jsonl    id, reason and detail of every dropped record; absent when none was
    OUT/media/train/...        hard links to the media (copies, where OUT is on another file system)

Media that already lie inside OUT stay where they are. Rows come first into memory, and nothing but
the dropped ids is written before every record of every split has been checked.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from omnitrain.errors import DataError

CONVERTERS = {
    "gsm8k": "omnitrain.data.converters.gsm8k",
    "avqa": "omnitrain.data.converters.avqa",
}
"""Name -> module; the module holds `converter`."""


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
    """The system instruction of every row."""

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


def convert(name: str, inputs: list[Path], out: Path, *, skip_bad: bool = False, workers: int = 1) -> Report:
    """Convert a data set into `out`.

    When a record was dropped and `skip_bad` is not set, no parquet file is written: the report and the
    list of dropped ids are all there is. workers: processes that open media files; 1 opens them in this one.
    Raises DataError when an input cannot be read, a worker dies, or `out` cannot be written.
    """
    from omnitrain.data.schema import system_hash, write_rows

    for path in inputs:
        if not path.exists():
            raise DataError(f"{path}: no such file or directory")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; OUT must be a directory")
    converter = load_converter(name)
    try:
        parsed = [_check(split, list(converter.records(split)), out, workers) for split in converter.splits(inputs)]
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror or error}") from error
    report = Report([item.report for item in parsed])
    report.notes += _shared_media(parsed)
    for item in parsed:
        report.files += _write_dropped(item.report)
    if report.bad and not skip_bad:
        return report
    for item in parsed:
        if not item.rows:
            continue
        counts = {"converter": name, "input": item.report.input, "dropped": dict(sorted(item.report.dropped.items()))}
        rows = _place_media(item, out)
        write_rows(item.report.path, rows, system_hash=system_hash(converter.system), extra=counts)
        item.report.written = True
        report.files.append(item.report.path)
    return report


@dataclass
class _Parsed:
    """A split between checking and writing."""

    split: Split
    report: SplitReport
    rows: list[dict[str, Any]]
    media: dict[Path, Any]
    """Resolved source file -> what checking it found."""


def _check(split: Split, records: list[dict[str, Any] | Dropped], out: Path, workers: int) -> _Parsed:
    """Open every media file of a split and sort its records into rows and dropped ones."""
    target = out / f"{split.name}.parquet"
    if any(target.exists() and target.samefile(file) for file in split.files):
        raise DataError(f"{target}: is input and output at once; choose another output directory")
    root = split.root.resolve()
    located = [record if isinstance(record, Dropped) else _locate(record, root) for record in records]
    wanted = sorted({item for rec in located if not isinstance(rec, Dropped) for item in rec[1]})
    media = dict(zip((path for path, _ in wanted), _inspect_all(wanted, workers), strict=True))
    parsed = _Parsed(split, SplitReport(split.name, target), [], media)
    for record in located:
        if not isinstance(record, Dropped):
            row, files = record
            bad = next(((path, kind) for path, kind in files if media[path].reason), None)
            if bad is None:
                parsed.rows.append(row)
                continue
            record = Dropped(row["id"], media[bad[0]].reason, f"{bad[0].relative_to(root)}: {media[bad[0]].detail}")
        parsed.report.dropped[record.reason] += 1
        parsed.report.dropped_records.append(record)
    parsed.report.kept = len(parsed.rows)
    parsed.report.notes += _other_rates(parsed)
    return parsed


def _parts(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a row that name a file."""
    return (part for message in row["messages"] for part in message["content"] if part.get("path") is not None)


def _locate(row: dict[str, Any], root: Path) -> tuple[dict[str, Any], list[tuple[Path, str]]] | Dropped:
    """A row with its media files resolved, as (path, kind), or why one is not there."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Dropped(row["id"], "invalid record", "a text that is not Unicode (half a surrogate pair)")
    files = []
    for part in _parts(row):
        kind, given = part["type"], part["path"]
        try:
            path = (root / given).resolve()
            outside, missing = not path.is_relative_to(root), not path.is_file()
        except (OSError, ValueError):  # a name that no file can have
            outside, missing = False, True
        if outside or missing:
            return Dropped(row["id"], "path outside the data directory" if outside else f"missing {kind}", given[:200])
        files.append((path, kind))
    return row, files


def _inspect_all(wanted: list[tuple[Path, str]], workers: int) -> Iterable[Any]:
    from omnitrain.data.media import inspect

    if workers <= 1 or len(wanted) <= 1:
        return [inspect(*item) for item in wanted]
    # A process per share and a file per answer: a decoder that crashes ends one process, and nothing waits for it.
    workers = min(workers, len(wanted))
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / str(number) for number in range(workers)]
        shares = [wanted[number::workers] for number in range(workers)]
        processes = [context.Process(target=_inspect_share, args=pair) for pair in zip(shares, answers)]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if all(process.exitcode == 0 for process in processes):
                found = [pickle.loads(answer.read_bytes()) for answer in answers]
                return [found[index % workers][index // workers] for index in range(len(wanted))]
        except BrokenPipeError:  # it died while it was being started
            pass
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
    raise DataError(
        "a worker process died while opening media files (a crashing decoder, or out of memory); "
        "run again with --workers 1 to see on which file"
    )


def _inspect_share(share: list[tuple[Path, str]], answer: Path) -> None:
    from omnitrain.data.media import inspect

    answer.write_bytes(pickle.dumps([inspect(*item) for item in share]))


def _other_rates(parsed: _Parsed) -> list[str]:
    from omnitrain.data.media import RATE

    rates = Counter(found.rate for found in parsed.media.values() if found.rate not in (0, RATE) and not found.reason)
    each = ", ".join(f"{count} at {rate} Hz" for rate, count in sorted(rates.items()))
    return [f"{parsed.split.name}: {each}; audio is resampled to {RATE} Hz whenever it is loaded"] if rates else []


def _shared_media(parsed: list[_Parsed]) -> list[str]:
    """Published splits stay as they are; media that stand on both sides are reported, compared by content."""
    notes = []
    for index, one in enumerate(parsed):
        for other in parsed[index + 1 :]:
            mine, theirs = ({m.sha256 for m in side.media.values() if m.sha256} for side in (one, other))
            if both := len(mine & theirs):
                where = f"{one.split.name} and {other.split.name}"
                notes.append(f"{both} media files stand in both {where} (splits kept as published)")
    return notes


def _write_dropped(report: SplitReport) -> list[Path]:
    from omnitrain.data.schema import write_text

    path = report.path.with_suffix(".dropped.jsonl")
    if not report.dropped_records:
        path.unlink(missing_ok=True)
        return []
    lines = [json.dumps(vars(record), ensure_ascii=False) for record in report.dropped_records]
    write_text(path, "\n".join(lines) + "\n")
    return [path]


def _place_media(parsed: _Parsed, out: Path) -> list[dict[str, Any]]:
    """Bring the media of the kept rows into `out` and return the rows with paths relative to it."""
    root, out = parsed.split.root.resolve(), out.resolve()
    placed: dict[Path, str] = {}
    added: list[Path] = []
    rows = []
    try:
        for row in parsed.rows:
            row = {**row, "messages": [{**m, "content": [dict(p) for p in m["content"]]} for m in row["messages"]]}
            for part in _parts(row):
                source = (root / part["path"]).resolve()
                if source not in placed:
                    placed[source] = _place(source, root, out, parsed.split.name, added)
                part["path"] = placed[source]
            rows.append(row)
    except OSError as error:
        for path in added:
            path.unlink(missing_ok=True)
        raise DataError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from error
    return rows


def _place(source: Path, root: Path, out: Path, split: str, added: list[Path]) -> str:
    """Link or copy one file; returns its path relative to `out`."""
    if source.is_relative_to(out):
        return source.relative_to(out).as_posix()
    target = out / "media" / split / source.relative_to(root)
    # A rename between two links to one file does nothing and would leave the temporary name behind.
    if not (target.exists() and target.samefile(source)):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        added.append(temporary)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        existed = target.exists()
        os.replace(temporary, target)
        if not existed:
            added.append(target)
    return target.relative_to(out).as_posix()
