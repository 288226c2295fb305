"""Opens every media file that the records of a split name, and sorts the records into rows and dropped ones."""

from __future__ import annotations

import hashlib
import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrain.data.converters import Dropped, Split, SplitReport
from omnitrain.errors import DataError

if TYPE_CHECKING:
    from omnitrain.data.media import Inspected

File = tuple[Path, str]
"""A resolved media file and what it is opened as ("image", "audio", "video")."""

_NAMED = 3
"""Files that a note names; the rest are counted."""
_MAGIC = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}


@dataclass
class Checked:
    """A split between checking and writing."""

    split: Split
    report: SplitReport
    rows: list[tuple[dict[str, Any], list[File]]] = field(default_factory=list)
    """Kept rows, each with the files of its media parts in their order."""
    media: dict[File, Inspected] = field(default_factory=dict)
    """What opening each file found."""


class Stash:
    """A hidden folder beside `out` where inline media are files until their rows are written. Use it in a `with`."""

    def __init__(self, out: Path) -> None:
        self._out = out.absolute()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Stash:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder:
            self._folder.cleanup()

    @property
    def folder(self) -> Path | None:
        """None as long as nothing was put into it."""
        return Path(self._folder.name).resolve() if self._folder else None

    def add(self, data: bytes, kind: str) -> Path:
        """Keep an encoded file under the hash of its content."""
        if self._folder is None:
            # On the file system of `out`, so that a hard link moves a file there.
            near = next(path for path in self._out.parents if path.is_dir())
            self._folder = tempfile.TemporaryDirectory(prefix=f".{self._out.name}.", dir=near)
        suffix = next((suffix for magic, suffix in _MAGIC.items() if data.startswith(magic)), f".{kind}")
        path = Path(self._folder.name).resolve() / (hashlib.sha256(data).hexdigest() + suffix)
        if not path.exists():
            path.write_bytes(data)
        return path


def media_parts(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a row that are media."""
    return (part for message in row["messages"] for part in message["content"] if part["type"] != "text")


def check(split: Split, records: Iterable[dict[str, Any] | Dropped], out: Path, stash: Stash, workers: int) -> Checked:
    """Find and open the media of a split's records."""
    target = out / f"{split.name}.parquet"
    if any(target.exists() and target.samefile(file) for file in split.files):
        raise DataError(f"{target}: is input and output at once; choose another output directory")
    root = split.root.resolve()
    located = [record if isinstance(record, Dropped) else _locate(record, root, stash) for record in records]
    wanted = sorted({file for record in located if not isinstance(record, Dropped) for file in record[1]})
    found = Checked(split, SplitReport(split.name, target), media=dict(zip(wanted, _inspect_all(wanted, workers))))
    for record in located:
        if not isinstance(record, Dropped):
            row, files = record
            bad = next((file for file in files if found.media[file].reason), None)
            if bad is None:
                videos = [found.media[file] for file in files if file[1] == "video"]
                found.rows.append((_with_track(row, videos), files))
                continue
            where = bad[0].relative_to(root) if bad[0].is_relative_to(root) else "inline"
            record = Dropped(row["id"], found.media[bad].reason, f"{where}: {found.media[bad].detail}")
        found.report.dropped[record.reason] += 1
        found.report.dropped_records.append(record)
    found.report.kept = len(found.rows)
    return found


def _locate(row: dict[str, Any], root: Path, stash: Stash) -> tuple[dict[str, Any], list[File]] | Dropped:
    """A row with its media files, or why one is not there."""
    files = []
    for part in media_parts(row):
        kind = part["type"]
        if part.get("data") is not None:
            path = stash.add(part.pop("data"), kind)
            part["path"] = path.name
        else:
            given = part["path"]
            try:
                path = (root / given).resolve()
                outside, missing = not path.is_relative_to(root), not path.is_file()
            except (OSError, ValueError, RuntimeError):  # a name that no file can have, or a link to itself
                outside, missing = False, True
            if outside or missing:
                reason = "path outside the data directory" if outside else f"missing {kind}"
                return Dropped(row["id"], reason, given[:200])
        files.append((path, kind))
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Dropped(row["id"], "invalid record", "a text that is not Unicode (half a surrogate pair)")
    except TypeError as error:  # a column of a parquet file may hold anything
        return Dropped(row["id"], "invalid record", f"its meta: {error}")
    return row, files


def _with_track(row: dict[str, Any], videos: list[Inspected]) -> dict[str, Any]:
    """A row whose meta says whether its videos have a sound track that can be heard."""
    if not videos:
        return row
    return {**row, "meta": {**row.get("meta", {}), "sound_track": all(video.has_audio for video in videos)}}


def _inspect_all(wanted: list[File], workers: int) -> list[Inspected]:
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


def _inspect_share(share: list[File], answer: Path) -> None:
    from omnitrain.data.media import inspect

    answer.write_bytes(pickle.dumps([inspect(*item) for item in share]))


def media_notes(checked: Checked) -> list[str]:
    """What a user should know of media that can be used: other sample rates, videos without sound."""
    return _other_rates(checked) + _silent_videos(checked)


def _other_rates(checked: Checked) -> list[str]:
    from omnitrain.data.media import RATE

    rates = Counter(found.rate for found in checked.media.values() if found.rate not in (0, RATE) and not found.reason)
    each = ", ".join(f"{count} at {rate} Hz" for rate, count in sorted(rates.items()))
    return [f"{checked.split.name}: {each}; audio is resampled to {RATE} Hz whenever it is loaded"] if rates else []


def _silent_videos(checked: Checked) -> list[str]:
    videos = {file: found for file, found in checked.media.items() if file[1] == "video" and not found.reason}
    silent = sorted(path.name for (path, _), found in videos.items() if not found.has_audio)
    if not silent:
        return []
    names = ", ".join(silent[:_NAMED]) + (f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else "")
    return [
        f"{checked.split.name}: {len(silent)} of {len(videos)} videos have no sound track to hear ({names}); their "
        "rows have meta.sound_track = false, and data.use_audio_in_video leaves them as they are"
    ]
