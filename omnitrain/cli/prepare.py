"""`omnitrain prepare`: published data sets to rows, and the demo data and tiny models to try things with."""

from __future__ import annotations

import difflib
import importlib
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnitrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from omnitrain.data.converters import Report
    from omnitrain.data.sample import Part, Row

app = typer.Typer(
    no_args_is_help=True, help="Convert a published data set to rows, or write demo data or a tiny model."
)

_Inputs = Annotated[list[Path], typer.Argument(metavar="INPUT...", help="What to convert.", show_default=False)]
_Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Directory for the parquet files and the media.", show_default=False)
]
_SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Write the good rows even when others were dropped.")]
_Show = Annotated[int, typer.Option(min=0, help="Print N rows of each split and modality as the model sees them.")]
_Workers = Annotated[int, typer.Option(min=1, help="Processes that open and check media files.")]


def register(parent: typer.Typer) -> None:
    """Add `prepare` to the main command."""
    parent.add_typer(app, name="prepare")


@app.command()
def gsm8k(inputs: _Inputs, out: _Out, skip_bad: _SkipBad = False, show: _Show = 0) -> None:
    """GSM8K: .jsonl or .parquet files with question and answer; the file's name says the split."""
    _convert("gsm8k", inputs, out, skip_bad, show, workers=1)


@app.command()
def avqa(inputs: _Inputs, out: _Out, skip_bad: _SkipBad = False, show: _Show = 0, workers: _Workers = 1) -> None:
    """AVQA-R1-6K: the folder that holds AVQA_R1, AVQA_R1 itself, or a split's JSON file."""
    _convert("avqa", inputs, out, skip_bad, show, workers)


@app.command()
def mmk12(inputs: _Inputs, out: _Out, skip_bad: _SkipBad = False, show: _Show = 0, workers: _Workers = 1) -> None:
    """MMK12: the folder of train-*.parquet and test-*.parquet, or shards by name."""
    _convert("mmk12", inputs, out, skip_bad, show, workers)


@app.command()
def nextqa(inputs: _Inputs, out: _Out, skip_bad: _SkipBad = False, show: _Show = 0, workers: _Workers = 1) -> None:
    """NExT-QA: CSV files and the folder of the videos, or one folder that holds both."""
    _convert("nextqa", inputs, out, skip_bad, show, workers)


@app.command()
def omni_preference(
    inputs: _Inputs,
    out: _Out,
    skip_bad: _SkipBad = False,
    show: _Show = 0,
    workers: _Workers = 1,
    validation_share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the media held out, with all their rows.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Draws what is held out.")] = 0,
) -> None:
    """Omni-Preference: the folder of the data set, or its final_rl_data.jsonl files."""
    _convert("omni-preference", inputs, out, skip_bad, show, workers, validation=validation_share, seed=seed)


class DemoSet(StrEnum):
    """The demo sets, by the converter that reads them."""

    avqa = "avqa"
    nextqa = "nextqa"
    preference = "preference"


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The set is written in it.", show_default=False)],
    only: Annotated[DemoSet, typer.Option(help="Which set to write.")] = DemoSet.avqa,
    rows: Annotated[
        int, typer.Option(min=1, help="Records in train and in warmup (validation has an eighth); pairs in all.")
    ] = 768,
    seed: Annotated[int, typer.Option(help="Draws the pictures, sounds and videos.")] = 0,
    warmup_noise: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the warmup records whose answer is a random letter.")
    ] = 0.8,
    shuffled: Annotated[bool, typer.Option("--shuffled", help="With --only preference: random verdicts, a control.")] = False,
) -> None:
    """A small set in a published layout: AVQA_R1 (colour and pitch), NExT-QA (colour and motion) or Omni-Preference."""
    from omnitrain.data.demo import write_demo
    from omnitrain.data.demo_nextqa import write_nextqa
    from omnitrain.data.demo_preference import write_preference

    if shuffled and only is not DemoSet.preference:
        raise UsageError("--shuffled has an effect with --only preference alone; remove it")
    if only is DemoSet.preference:
        target = write_preference(folder, rows=rows, seed=seed, shuffled=shuffled)
        counts = f"{rows} preference pairs"
    else:
        write = write_demo if only is DemoSet.avqa else write_nextqa
        target = write(folder, rows=rows, seed=seed, warmup_noise=warmup_noise)
        held = "valid" if only is DemoSet.avqa else "val"
        counts = f"{rows} train, {max(1, rows // 8)} {held} and {rows} warmup records"
    _console().print(f"{target}: demo set of {counts}", soft_wrap=True)


@app.command()
def tiny(
    family: Annotated[str, typer.Argument(help="The model family, such as qwen3_omni.", show_default=False)],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The checkpoint directory to write.", show_default=False)
    ],
    seed: Annotated[int, typer.Option(help="Draws the weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """A tiny random model of a family, in the published checkpoint layout."""
    families = _families()
    if family not in families:
        close = difflib.get_close_matches(family, families, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"unknown model family {family}{hint} (there is {', '.join(families) or 'none'})")
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype {dtype}: it must be float32 or bfloat16")
    importlib.import_module(f"omnitrain.models.{family}.tiny").write_tiny(folder, seed=seed, dtype=dtype)
    _console().print(f"{folder}: tiny {family} checkpoint, {dtype}, seed {seed}", soft_wrap=True)


def _families() -> list[str]:
    """Families with a tiny variant, found without importing any."""
    import omnitrain.models

    return sorted(path.parent.name for path in Path(omnitrain.models.__file__).parent.glob("*/tiny.py"))


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False)


def _convert(
    name: str, inputs: list[Path], out: Path, skip_bad: bool, show: int, workers: int, **held_out: float | int
) -> None:
    from omnitrain.data.converters import convert

    # Asked to end, it ends as with Ctrl-C: its processes and its hidden folder of pictures go with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = convert(name, inputs, out, skip_bad=skip_bad, workers=workers, **held_out)
    console = _console()
    _print_report(console, name, report)
    for split in report.splits:
        if show and split.written:
            _print_rows(console, split.path, show)
    if report.bad and not skip_bad:
        raise DataError(
            f"{report.bad} of {report.kept + report.bad} records were dropped and no rows were written; "
            "mend them, or pass --skip-bad to write the others"
        )
    if empty := [split.name for split in report.splits if not split.kept]:
        raise DataError(f"no row left in {', '.join(empty)}")


def _print_report(console: Console, name: str, report: Report) -> None:
    """Input, kept and dropped by reason, then what was written."""
    from rich.table import Table

    table = Table(title=f"prepare {name}")
    table.add_column("split")
    for column in ("input", "kept", "dropped"):
        table.add_column(column, justify="right")
    for split in report.splits:
        table.add_row(split.name, str(split.input), str(split.kept), str(split.dropped.total()))
        for reason, count in split.dropped.most_common():
            table.add_row(f"  {reason}", "", "", str(count))
    console.print(table)
    for note in [note for split in report.splits for note in split.notes] + report.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for path in report.files:
        console.print(f"wrote {path}", soft_wrap=True)


def _print_rows(console: Console, path: Path, count: int) -> None:
    from omnitrain.data.schema import RowFile

    rows = RowFile(path)
    places: dict[str, list[int]] = {}
    for index, modality in enumerate(rows.modalities):
        places.setdefault(modality, []).append(index)
    for index in sorted(index for found in places.values() for index in found[:count]):
        console.print(f"\n{path} row {index}\n{render(rows[index])}", soft_wrap=True)


def render(row: Row) -> str:
    """A row as text: its turns with media described in brackets, then the answer."""
    lines = [f"id {row.id}, source {row.source}, {row.modality}"]
    for message in row.messages:
        pieces = [_render_part(part, row.root) for part in message.content]
        lines.append(f"{message.role}: " + "\n".join(pieces))
    for name in ("answer", "chosen", "rejected"):
        if getattr(row, name) is not None:
            lines.append(f"{name}: {getattr(row, name)}")
    return "\n".join(lines)


def _render_part(part: Part, root: Path) -> str:
    """Text as it is; of a video the frames that a recipe looks at by default."""
    from omnitrain.data.media import RATE, load_audio, load_image, load_track, load_video
    from omnitrain.data.video import FrameSampling

    if part.type == "text":
        return part.text or ""
    where = part.path or "inline"
    if part.type == "image":
        width, height = load_image(part, root).size
        return f"[image {where} {width}x{height}]"
    if part.type == "audio":
        return f"[audio {where} {len(load_audio(part, root)) / RATE:.2f} s]"
    video = load_video(part, root, FrameSampling())
    count, height, width, _ = video.frames.shape
    track = load_track(part, root)
    sound = "without a sound track" if track is None else f"with {len(track) / RATE:.2f} s of sound"
    return f"[video {where} {width}x{height}, {count} frames of {video.seconds:.2f} s, {sound}]"
