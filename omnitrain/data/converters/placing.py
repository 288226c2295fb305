"""Brings the media of kept rows into the output directory: hard links where possible, else copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omnitrain.data.converters.checking import Checked, Stash, media_parts
from omnitrain.errors import DataError


@contextmanager
def placed_media(checked: Checked, out: Path, stash: Stash) -> Iterator[list[dict[str, Any]]]:
    """Place the media of a split's rows; the rows with paths relative to `out` are for the block to write.

    Raises DataError when `out` cannot be written. If the block fails, too, what was placed is taken back.
    """
    root, out, stashed = checked.split.root.resolve(), out.resolve(), stash.folder
    placed: dict[Path, str] = {}
    added: list[Path] = []
    rows = []
    try:
        for row, files in checked.rows:
            row = {**row, "messages": [{**m, "content": [dict(p) for p in m["content"]]} for m in row["messages"]]}
            for part, (source, _) in zip(media_parts(row), files, strict=True):
                if source not in placed:
                    base = stashed if stashed and source.is_relative_to(stashed) else root
                    placed[source] = _place(source, base, out, checked.split.name, added)
                part["path"] = placed[source]
            rows.append(row)
        yield rows
    except BaseException as error:
        for path in added:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DataError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from error
        raise


def _place(source: Path, base: Path, out: Path, split: str, added: list[Path]) -> str:
    """Link or copy one file; returns its path relative to `out`."""
    if source.is_relative_to(out):
        return source.relative_to(out).as_posix()
    target = out / "media" / split / source.relative_to(base)
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
