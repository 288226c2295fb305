"""samples/step_N: what the policy said, with every reward; best and worst of a group."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from omnitrain.data.files import RowFiles
from omnitrain.data.sample import Message, Row, Sample


def write_samples(
    folder: Path, rows: RowFiles, samples: list[Sample], groups: int, messages: Callable[[Row], list[Message]]
) -> None:
    """Write the best and worst response of the first `groups` groups to `folder`/samples.jsonl, and link their media.

    messages: a row's messages as the model saw them (Processing.messages): the recipe may replace the system turn.
    """
    by_group: dict[int, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group, []).append(sample)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for group in sorted(by_group)[:groups]:
        scored = sorted((s for s in by_group[group] if not s.failed), key=lambda s: s.reward)
        if not scored:
            continue
        row = rows[scored[0].row]
        shown = messages(row)
        chosen = {"worst": scored[0], "best": scored[-1]} if len(scored) > 1 else {"only": scored[0]}
        for label, sample in chosen.items():
            lines.append(_describe(label, row, shown, sample) | {"media": _media(folder, row, shown)})
    (folder / "samples.jsonl").write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8"
    )


def _describe(label: str, row: Row, shown: list[Message], sample: Sample) -> dict:
    prompt = "\n".join(
        f"{m.role}: " + "".join(part.text if part.type == "text" else f"[{part.type}]" for part in m.content)
        for m in shown
    )
    return {
        "which": label,
        "row": row.id,
        "source": row.source,
        "prompt": prompt,
        "answer": row.answer,
        "response": sample.text,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "advantage": sample.advantage,
        "finish_reason": sample.finish_reason,
        "tokens": len(sample.tokens),
    }


def _media(folder: Path, row: Row, shown: list[Message]) -> list[str]:
    """Names of the row's media files, linked (or copied) into the folder so that a report finds them."""
    names = []
    for part in (part for message in shown for part in message.content if part.path):
        name = part.path.replace("/", "_")
        link = folder / name
        if not link.is_symlink():
            target = (row.root / part.path).resolve()
            try:
                os.symlink(target, link)
            except OSError:  # a file system without links
                shutil.copyfile(target, link)
        names.append(name)
    return names
