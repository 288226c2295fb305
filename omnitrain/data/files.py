"""Several parquet files as one sequence of rows."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from omnitrain.data.sample import Row
from omnitrain.data.schema import RowFile
from omnitrain.errors import DataError


class RowFiles:
    """The rows of one or several files, in order: `len(rows)`, `rows[i]`, `rows.ids`. `Row.index` counts over all.

    Raises DataError for a file that RowFile refuses, and for an id that stands in two of them.
    """

    def __init__(self, paths: Sequence[Path | str]) -> None:
        self.files = [RowFile(path) for path in paths]
        if not self.files:
            raise ValueError("no file of rows")
        self._starts = [0, *accumulate(map(len, self.files))]
        if len(self.files) > 1:
            self._check_ids()

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return [file.path for file in self.files]

    @property
    def path(self) -> str:
        """The files by name, for messages."""
        return ", ".join(map(str, self.paths))

    @property
    def ranges(self) -> list[range]:
        """The rows of each file, as indices."""
        return [range(start, stop) for start, stop in zip(self._starts, self._starts[1:])]

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: row {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        return replace(self.files[number][index - self._starts[number]], index=index)

    @cached_property
    def ids(self) -> list[str]:
        """The ids of all rows, in order."""
        return [name for file in self.files for name in file.ids]

    @cached_property
    def modalities(self) -> list[str]:
        """Row.modality of all rows, in order. Reads no media."""
        return [modality for file in self.files for modality in file.modalities]

    def column(self, name: str) -> list[str | None]:
        """One text column of all rows: answer, chosen, rejected, source. Reads no media."""
        return [value for file in self.files for value in file.column(name)]

    @property
    def sources(self) -> Counter[str]:
        """How many rows each source has."""
        return Counter(self.column("source"))

    def ties(self) -> list[int]:
        """Rows whose chosen and rejected responses are the same text: nothing is preferred in them."""
        pairs = zip(self.column("chosen"), self.column("rejected"))
        return [index for index, (chosen, rejected) in enumerate(pairs) if chosen is not None and chosen == rejected]

    def first_without(self, *columns: str) -> str | None:
        """File and id of the first row in which all of these columns are empty, as "FILE: row ID"; None without one."""
        for file in self.files:
            if (row := file.first_without(*columns)) is not None:
                return f"{file.path}: row {row}"
        return None

    def digest(self) -> str:
        """SHA-256 of the files' content, inline media included."""
        whole = hashlib.sha256()
        for file in self.files:
            with file.path.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()

    def _check_ids(self) -> None:
        held: dict[str, Path] = {}
        for file in self.files:
            for name in file.ids:
                if name in held:
                    raise DataError(
                        f"row {name!r} stands in {held[name]} and in {file.path}; leave one of the files out, or "
                        "prepare one of them with other ids"
                    )
            held |= dict.fromkeys(file.ids, file.path)
