"""The one row schema, as parquet: writing rows whole or not at all, and reading them lazily.

| column | type | |
|---|---|---|
| id | string | unique in the file |
| messages | list of {role, content: list of {type, text, path, data}} | the prompt's turns |
| answer | string or null | the label a reward compares with |
| chosen, rejected | string or null | preference pairs; `chosen` is also what sft imitates when present |
| source | string | the data set's name; rewards and validation metrics go by it |
| meta | string | a JSON object with whatever else the data set says |

A part is text, or one image, audio or video: by `path`, relative to the folder the parquet file is in,
or as the encoded file in `data`. The file's metadata holds the schema version and the SHA-256 of the
system instruction. Beside `NAME.parquet` lies `NAME.summary.json`, for those who only need to count.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from omnitrain.data.sample import MEDIA, Message, Part, Row, modality_of
from omnitrain.errors import DataError

SCHEMA_VERSION = 1

_VERSION_KEY = b"omnitrain.schema_version"
_SYSTEM_KEY = b"omnitrain.system_sha256"
# Rows are drawn at random, so a row group is small enough to be decoded for one row.
_GROUP_ROWS = 512
_GROUP_BYTES = 32 << 20
_CACHED_GROUPS = 8

_PART = pa.struct(
    [
        pa.field("type", pa.string(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("path", pa.string()),
        pa.field("data", pa.binary()),
    ]
)
_MESSAGE = pa.struct([pa.field("role", pa.string(), nullable=False), pa.field("content", pa.list_(_PART))])
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("messages", pa.list_(_MESSAGE), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("chosen", pa.string()),
        pa.field("rejected", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("meta", pa.string(), nullable=False),
    ]
)


def system_hash(system: str | None) -> str:
    """SHA-256 of a system instruction; no instruction hashes as the empty string."""
    return hashlib.sha256((system or "").encode()).hexdigest()


def summary_path(path: Path) -> Path:
    """Where the counts of a data file lie: `train.parquet` -> `train.summary.json`."""
    return path.with_suffix(".summary.json")


def write_rows(
    path: Path, rows: Iterable[dict[str, Any]], *, system_hash: str, extra: dict[str, Any] | None = None
) -> int:
    """Write rows and their summary; returns their number. `path` appears only when it is complete.

    rows: dicts by the schema, `meta` as a dict; absent columns are null.
    extra: further keys for the summary (the converter's counts).
    Raises DataError for a row that breaks the schema, and for no rows at all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    metadata = {_VERSION_KEY: str(SCHEMA_VERSION).encode(), _SYSTEM_KEY: system_hash.encode()}
    counts = _Counts()
    try:
        with pq.ParquetWriter(temporary, SCHEMA.with_metadata(metadata), compression="zstd") as writer:
            for group in _groups(map(counts.check, rows)):
                writer.write_table(pa.Table.from_pylist(group, SCHEMA))
        if not counts.ids:
            raise DataError(f"{path}: no row to write")
        digest = _file_sha256(temporary)
        # Counts of an older file must not outlive it.
        summary_path(path).unlink(missing_ok=True)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    summary = {
        "rows": len(counts.ids),
        "schema_version": SCHEMA_VERSION,
        "sha256": digest,
        "system_sha256": system_hash,
        "sources": dict(sorted(counts.sources.items())),
        "modalities": dict(sorted(counts.modalities.items())),
    }
    write_text(summary_path(path), json.dumps({**summary, **(extra or {})}, indent=2, ensure_ascii=False) + "\n")
    return len(counts.ids)


def write_text(path: Path, text: str) -> None:
    """Write a small text file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


class RowFile:
    """The rows of one parquet file: `len(f)`, `f[i]`, `f.ids`. A row group is decoded when a row of it is asked for.

    Raises DataError, with the fix, when the file is absent, damaged, empty, or of another schema version.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.root = self.path.parent.resolve()
        self._file = _open(self.path)
        metadata = self._file.schema_arrow.metadata or {}
        _check_version(self.path, metadata.get(_VERSION_KEY))
        self.system_hash: str = metadata.get(_SYSTEM_KEY, b"").decode()
        self._starts = [0]
        for group in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(group).num_rows)
        if not len(self):
            raise DataError(f"{self.path}: holds no rows; prepare it again")
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()
        self._ids: list[str] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: row {index} of {len(self)}")
        group = bisect_right(self._starts, index) - 1
        with self._lock:
            table = self._group(group)
        return _row(table.slice(index - self._starts[group], 1).to_pylist()[0], self.root, index)

    @property
    def ids(self) -> list[str]:
        """The ids of all rows, in order."""
        if self._ids is None:
            with self._lock:
                self._ids = self._read(lambda: self._file.read(["id"])).column("id").to_pylist()
        return self._ids

    def column(self, name: str) -> list[str | None]:
        """One text column of all rows: answer, chosen, rejected, source. Reads no media."""
        with self._lock:
            return self._read(lambda: self._file.read([name])).column(name).to_pylist()

    @property
    def modalities(self) -> list[str]:
        """Row.modality of all rows, in order. Reads the parts' types, not the parts."""
        leaf = next(path for path in _leaves(self._file) if path.startswith("messages.") and path.endswith(".type"))
        with self._lock:
            turns = self._read(lambda: self._file.read([leaf])).column("messages").to_pylist()
        return [modality_of(part["type"] for turn in row for part in turn["content"] or ()) for row in turns]

    def first_without(self, *columns: str) -> str | None:
        """Id of the first row in which all of these columns are empty; None if there is none. Reads no media."""
        empty = (all(value is None for value in values) for values in zip(*map(self.column, columns)))
        return next((self.ids[index] for index, found in enumerate(empty) if found), None)

    def _group(self, group: int) -> pa.Table:
        if group not in self._cache:
            self._cache[group] = self._read(lambda: self._file.read_row_group(group))
            while len(self._cache) > _CACHED_GROUPS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return self._cache[group]

    def _read(self, read):
        try:
            return read()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.path}: damaged ({_first_line(error)}); prepare it again") from error


def _leaves(file: pq.ParquetFile) -> list[str]:
    return [file.schema.column(index).path for index in range(len(file.schema))]


def _open(path: Path) -> pq.ParquetFile:
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.glob("*.parquet"))[:4]) or "none there"
        raise DataError(f"{path}: is a directory; name a parquet file in it ({inside})")
    if not path.exists():
        raise DataError(f"{path}: no such file; write it with `omnitrain prepare`")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({_first_line(error)}); prepare it again") from error


def _check_version(path: Path, found: bytes | None) -> None:
    if found == str(SCHEMA_VERSION).encode():
        return
    if found is None:
        raise DataError(f"{path}: a parquet file without omnitrain's row schema; convert it with `omnitrain prepare`")
    version = found.decode(errors="replace")
    newer = version.isdigit() and int(version) > SCHEMA_VERSION
    fix = "install the omnitrain that wrote it, or prepare it again with this one" if newer else "prepare it again"
    raise DataError(f"{path}: row schema version {version}, this omnitrain reads version {SCHEMA_VERSION}; {fix}")


def _row(record: dict[str, Any], root: Path, index: int) -> Row:
    messages = tuple(
        Message(message["role"], tuple(Part(**part) for part in message["content"])) for message in record["messages"]
    )
    return Row(
        id=record["id"],
        messages=messages,
        answer=record["answer"],
        source=record["source"],
        meta=json.loads(record["meta"]),
        root=root,
        index=index,
        chosen=record["chosen"],
        rejected=record["rejected"],
    )


class _Counts:
    """Checks rows on their way to the file and counts what passes."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.sources: Counter[str] = Counter()
        self.modalities: Counter[str] = Counter()

    def check(self, row: dict[str, Any]) -> dict[str, Any]:
        name = row.get("id")
        unknown = sorted(set(row) - set(SCHEMA.names))
        if unknown:
            raise DataError(f"row {name!r}: unknown column {unknown[0]}; the schema has {', '.join(SCHEMA.names)}")
        if not isinstance(name, str) or not name:
            raise DataError(f"a row has id {name!r}; it must be a non-empty string")
        if name in self.ids:
            raise DataError(f"row {name!r}: this id stands in the file twice")
        if not row.get("source") or not row.get("messages"):
            raise DataError(f"row {name!r}: source and messages must not be empty")
        parts = [part for message in row["messages"] for part in message["content"]]
        for part in parts:
            _check_part(name, part)
        self.ids.add(name)
        self.sources[row["source"]] += 1
        self.modalities[modality_of(part["type"] for part in parts)] += 1
        return {**row, "meta": json.dumps(row.get("meta") or {}, ensure_ascii=False, sort_keys=True)}


def _check_part(name: str, part: dict[str, Any]) -> None:
    kind, held = part.get("type"), {key for key in ("text", "path", "data") if part.get(key) is not None}
    allowed = [{"text"}] if kind == "text" else [{"path"}, {"data"}]
    if kind != "text" and kind not in MEDIA:
        raise DataError(f"row {name!r}: a part of type {kind!r}; it must be text, {', '.join(MEDIA)}")
    if held not in allowed:
        raise DataError(f"row {name!r}: a part of type {kind} holds {sorted(held)}; it must hold {allowed}")
    if "path" in held and (PurePosixPath(part["path"]).is_absolute() or ".." in PurePosixPath(part["path"]).parts):
        raise DataError(
            f"row {name!r}: media path {part['path']} must be relative to the data directory and stay in it"
        )


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        group.append(row)
        size += sum(
            len(value)
            for m in row["messages"]
            for p in m["content"]
            for value in p.values()
            if isinstance(value, (str, bytes))
        )
        if len(group) == _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__
