"""A small data set in NExT-QA's published layout, whose task a tiny model learns: the colour and motion of a square.

The five options are the same in every question, so the answer is a fixed function of what is seen. About half of the
clips have a sound track, a tone that says nothing about the answer. Every question has a clip of its own. In `warmup`
the answer of a share of the questions is drawn at random, as in the AVQA demo set; imitating it brings a model to a
reward of about 1 - 4/5 of that share, 0.36 by default.
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

from omnitrain.data.demo import COLOURS, demo_folder
from omnitrain.data.demo_clips import FRAMES, MOTIONS, SIZE, write_clip

QUESTION = "Which colour and motion?"
OPTIONS = [f"{colour} {motion}" for colour in COLOURS for motion in MOTIONS[:2]] + ["no motion"]
_COLUMNS = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()
_FIRST = {"train": 2000000, "val": 4000000, "warmup": 6000000}
"""The first video id of a split."""


def write_nextqa(folder: Path, *, rows: int = 768, seed: int = 0, warmup_noise: float = 0.8) -> Path:
    """Write folder/NExT-QA with the tables train (rows), val (rows / 8) and warmup (rows); returns it.

    The same arguments give the same files, and find them when they are already there. DataError when
    a NExT-QA that is not a demo set is in the way.
    """
    with demo_folder(folder / "NExT-QA", rows=rows, seed=seed, warmup_noise=warmup_noise) as target:
        if target is not None:
            mapped: dict[str, str] = {}
            for split, count in {"train": rows, "val": max(1, rows // 8), "warmup": rows}.items():
                mapped |= _write_split(target, split, count, seed, warmup_noise if split == "warmup" else 0.0)
            (target / "map_vid_vidorID.json").write_text(json.dumps(mapped, indent=0) + "\n")
    return folder / "NExT-QA"


def _write_split(folder: Path, split: str, count: int, seed: int, noise: float) -> dict[str, str]:
    """Write one table and its clips; returns video id -> path without suffix."""
    mapped = {}
    with (folder / f"{split}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for index in range(count):
            rng = random.Random(f"demo/nextqa/{seed}/{split}/{index}")
            answer = rng.randrange(len(OPTIONS))
            still = OPTIONS[answer] == "no motion"
            colour, motion = (rng.choice(list(COLOURS)), "still") if still else OPTIONS[answer].split(" ", 1)
            video = str(_FIRST[split] + index)
            mapped[video] = f"{video[:4]}/{video}"
            write_clip(folder / "NExTVideo" / f"{mapped[video]}.mp4", colour, motion, sound=rng.random() < 0.5, rng=rng)
            if rng.random() < noise:
                answer = rng.randrange(len(OPTIONS))
            table.writerow([video, FRAMES, SIZE, SIZE, QUESTION, answer, 0, "DO", *OPTIONS])
    return mapped
