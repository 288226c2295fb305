"""Which rows the gates look at: a few of every kind that the training rows hold, wherever in the files those are."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass

from omnitrain.data.sample import Prompt
from omnitrain.errors import DataError
from omnitrain.train.prompts import PromptSource

ROWS_PER_KIND = 2
TRIES = 32
"""Rows of one kind or source that are tried; the others may be too long as well."""
SOURCES = 16
"""Most sources that have a row in the probe."""


@dataclass(frozen=True)
class Probe:
    """The chosen rows, in the files' order, and what each of them is."""

    kinds: dict[int, str]
    """By row: its modality, and for videos whether their sound track is heard, where the recipe asks for it."""
    sources: dict[int, str]
    """By row."""
    missing: tuple[str, ...]
    """Kinds and sources without a row, in words."""

    @property
    def rows(self) -> list[int]:
        return list(self.kinds)


def choose(source: PromptSource, *, tracks: bool) -> Probe:
    """Up to ROWS_PER_KIND rows of each kind, then one of each source that has none yet. Collective.

    tracks: whether the sound tracks of videos are heard, so that videos with and without one are kinds of their own. Which is
    which says `meta.sound_track`; where a row has none, a few are decoded.

    Raises DataError when no row fits: gates over nothing would all pass.
    """
    labels = _labels(source, tracks)
    names = source.rows.column("source")
    kinds: dict[int, str] = {}
    found: Counter[str] = Counter()
    missing, tried = [], 0
    untold = _untold(labels) if tracks else set()
    for label in sorted(set(labels), key=lambda label: (label in untold, label)):
        # Among videos that do not tell, both kinds are looked for.
        wanted = [f"{label} {heard}" for heard in _HEARD] if label in untold else [label]
        rows, fitted = _some(labels, label), 0
        for row in rows:
            if all(found[kind] >= ROWS_PER_KIND for kind in wanted):
                break
            tried += 1
            if source.fitting([row]):
                fitted += 1
                kind = kind_of(source.encode(row), tracks)
                if found[kind] < ROWS_PER_KIND:
                    found[kind] += 1
                    kinds[row] = kind
        if not fitted and not all(found[kind] for kind in wanted):
            missing.append(f"no {label} row: none of {len(rows)} fits into {source.limits}")
    if not kinds:
        raise DataError(f"{source.rows.path}: none of {tried} rows fits into {source.limits}; raise it")
    by_size = [name for name, _ in Counter(names).most_common()]
    here = {names[row] for row in kinds}
    for name in [name for name in by_size if name not in here][: max(0, SOURCES - len(here))]:
        if (row := next((row for row in _some(names, name) if source.fitting([row])), None)) is not None:
            kinds[row] = kind_of(source.encode(row), tracks)
            here.add(name)
    if left := [name for name in by_size if name not in here]:
        missing.append(f"no row of source {', '.join(left[:3])}{f' and {len(left) - 3} more' if len(left) > 3 else ''}")
    ordered = {row: kinds[row] for row in sorted(kinds)}
    return Probe(ordered, {row: names[row] for row in ordered}, tuple(missing))


_HEARD = ("with sound", "without sound")


def kind_of(prompt: Prompt, tracks: bool) -> str:
    """A prompt's modality; with `tracks` a video's says whether one is heard in it."""
    row = prompt.row
    if not tracks or "video" not in row.modality:
        return row.modality
    sounds = sum(part.type == "audio" for message in row.messages for part in message.content)
    return f"{row.modality} {_HEARD[len(prompt.media.get('audio', ())) <= sounds]}"


def _labels(source: PromptSource, tracks: bool) -> list[str]:
    """Of every row, its kind as far as that is known without opening media."""
    labels = list(source.rows.modalities)
    if tracks and any("video" in label for label in labels):
        for row, meta in enumerate(source.rows.column("meta")):
            told = json.loads(meta).get("sound_track") if "video" in labels[row] else None
            if isinstance(told, bool):
                labels[row] = f"{labels[row]} {_HEARD[not told]}"
    return labels


def _untold(labels: list[str]) -> set[str]:
    return {label for label in labels if "video" in label and not label.endswith(_HEARD)}


def _some(labels: list[str], label: str) -> list[int]:
    """Up to TRIES rows of this label from all over the files, the same on every rank."""
    rows = [row for row, found in enumerate(labels) if found == label]
    return sorted(random.Random(0).sample(rows, min(TRIES, len(rows))))
