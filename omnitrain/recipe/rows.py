"""The number of rows of a parquet file, without pyarrow: its import alone takes longer than a plan may.

A parquet file ends in its metadata (Thrift, compact protocol), the metadata's length and "PAR1". Field 3 of the
metadata is the number of rows; what stands before it is skipped. A property test compares with pyarrow.
"""

import json
from pathlib import Path

from omnitrain.errors import DataError

_MAGIC = b"PAR1"
_STRUCT, _LIST, _SET, _BINARY, _DOUBLE, _BYTE = 12, 9, 10, 8, 7, 3
_NUM_ROWS = 3


def count_rows(path: Path) -> int:
    """Rows of a parquet file. DataError if it is not one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 8))
            tail = file.read(8)
            length = int.from_bytes(tail[:4], "little")
            if tail[4:] != _MAGIC or length + 8 > size:
                raise DataError(f"{path} is not a complete parquet file; write it again with `omnitrain prepare`")
            file.seek(size - 8 - length)
            rows = _Compact(file.read(length)).num_rows()
            if rows < 0:
                raise KeyError(rows)
            return rows
    except (IndexError, KeyError):
        raise DataError(f"{path} has damaged parquet metadata; write it again with `omnitrain prepare`") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def modalities(paths: list[Path]) -> set[str]:
    """The kinds of media in these files ("image", "audio", "video"), by the summaries that lie beside them, if any."""
    found: set[str] = set()
    for path in paths:
        try:
            counts = json.loads(path.with_suffix(".summary.json").read_text())["modalities"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a file written by something else: then it is not known
        found.update(kind for names in counts for kind in names.split("+"))
    return found - {"text"}


def summary_counts(paths: list[Path], key: str) -> dict[str, int] | None:
    """Rows by "sources" or "modalities" over these files; None where a file has no summary, or one of other rows."""
    found: dict[str, int] = {}
    for path in paths:
        try:
            summary = json.loads(path.with_suffix(".summary.json").read_text())
            if summary["rows"] != count_rows(path):
                return None
            for name, count in summary[key].items():
                found[name] = found.get(name, 0) + count
        except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
            return None
    return found


class _Compact:
    """As much of Thrift's compact protocol as it takes to find one field."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def num_rows(self) -> int:
        field = 0
        while kind := self._field_kind():
            field = field + self.delta if self.delta else self._zigzag()
            if field == _NUM_ROWS:
                return self._zigzag()
            self._skip(kind)
        raise KeyError(_NUM_ROWS)

    def _field_kind(self) -> int:
        head = self._byte()
        self.delta = head >> 4
        return head & 15

    def _skip(self, kind: int) -> None:
        if kind in (_BYTE, _DOUBLE):
            self.at += 1 if kind == _BYTE else 8
        elif kind == _BINARY:
            size = self._varint()
            self.at += size
        elif kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            for _ in range(count):
                # In a list a boolean takes a byte; as a field it is in the field's type.
                self._skip(_BYTE if head & 15 in (1, 2) else head & 15)
        elif kind == _STRUCT:
            while inner := self._field_kind():
                if not self.delta:
                    self._zigzag()
                self._skip(inner)
        elif kind in (4, 5, 6):
            self._varint()
        elif kind not in (1, 2):
            raise KeyError(kind)

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
