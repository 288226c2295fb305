"""Which rows stand on which side: a held-out split by hash, and media that published splits share."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

from omnitrain.data.converters import SplitReport
from omnitrain.data.converters.checking import Checked, File

VALIDATION = "validation"


def hold_out(checked: Checked, share: float, seed: int) -> list[Checked]:
    """Cut a validation split off: about `share` of the media, by a hash of their content and the seed.

    Rows that share a media file, or a copy of it under another name, stay together; a row without media goes by
    the hash of its text. Order, ids and file names do not matter, and new rows move no old one. Dropped records
    stay in the first report.
    """
    if not share or not checked.rows:
        return [checked]
    sides: dict[bool, list[tuple[dict[str, Any], list[File]]]] = {False: [], True: []}
    for row, key in zip(checked.rows, _keys(checked), strict=True):
        draw = int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8], "big") / 2**64
        sides[draw < share].append(row)
    report = replace(checked.report, kept=len(sides[False]))
    held = SplitReport(VALIDATION, checked.report.path.with_name(f"{VALIDATION}.parquet"), kept=len(sides[True]))
    if not (report.kept and held.kept):
        held.notes.append(
            f"all {len(checked.rows)} rows fell on one side, as there are few different media; "
            "change --validation-share (0 holds out nothing) or --seed"
        )
    return [
        Checked(split, part, rows, {file: checked.media[file] for _, files in rows for file in files})
        for split, part, rows in (
            (checked.split, report, sides[False]),
            (replace(checked.split, name=VALIDATION), held, sides[True]),
        )
    ]


def _keys(checked: Checked) -> list[str]:
    """For each row the smallest hash among the media it hangs together with."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    hashes = []
    for row, files in checked.rows:
        own = [checked.media[file].sha256 for file in files] or [_text_hash(row)]
        hashes.append(own[0])
        for other in own[1:]:
            low, high = sorted((root(own[0]), root(other)))
            parent[high] = low
    return [root(name) for name in hashes]


def _text_hash(row: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row["messages"], sort_keys=True).encode()).hexdigest()


def shared_media(checked: list[Checked]) -> list[str]:
    """Notes on media that stand on both sides of published splits, compared by content; the splits stay as they are."""
    holders: dict[str, set[str]] = defaultdict(set)
    for part in checked:
        for found in part.media.values():
            if found.sha256:
                holders[found.sha256].add(part.split.name)
    names = [part.split.name for part in checked]
    notes = []
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            if both := sum({one, other} <= held for held in holders.values()):
                notes.append(f"{both} media files stand in both {one} and {other} (splits kept as published)")
    return notes
