"""A small data set in the published AVQA layout, whose task a tiny model learns in minutes.

The picture has one of two colours and the sound one of two pitches; the four options are the
combinations, always in the same order, so the answer is a fixed function of what is seen and heard.
`valid` has no picture or sound in common with `train`. In `warmup` the solution of a share of the
records (`warmup_noise`) is replaced by a letter drawn at random: imitating it brings a model to a
reward of about 1 - 3/4 of that share, 0.4 by default, where reinforcement has something to do.
"""

from __future__ import annotations

import json
import random
import shutil
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from omnitrain.errors import DataError

COLOURS = {"blue": (20, 20, 230), "red": (230, 20, 20)}
PITCHES = {"high": 2500.0, "low": 300.0}
"""Hz."""
_PAIRS = [f"{colour} {pitch}" for colour in COLOURS for pitch in PITCHES]
OPTIONS = [f"{letter}. {pair}" for letter, pair in zip("ABCD", _PAIRS, strict=True)]
PROBLEM = "Which colour and pitch?"
SIZE = 64
SECONDS = 0.5
RATE = 16000


def write_demo(folder: Path, *, rows: int = 768, seed: int = 0, warmup_noise: float = 0.8) -> Path:
    """Write folder/AVQA_R1 with the splits train (rows), valid (rows / 8) and warmup (rows); returns it.

    The same arguments give the same files, and find them when they are already there. DataError when
    an AVQA_R1 that is not a demo set is in the way.
    """
    with demo_folder(folder / "AVQA_R1", rows=rows, seed=seed, warmup_noise=warmup_noise) as target:
        if target is not None:
            for split, count in {"train": rows, "valid": max(1, rows // 8), "warmup": rows}.items():
                _write_split(target / split, split, count, seed, warmup_noise if split == "warmup" else 0.0)
    return folder / "AVQA_R1"


@contextmanager
def demo_folder(target: Path, **made_with: float) -> Iterator[Path | None]:
    """A temporary folder that replaces `target` at the end; None if that was made with the same arguments.

    DataError when something that is not a demo set is in the way, or the disk is full.
    """
    marker = target / "demo.json"
    if target.exists():
        if not marker.exists():
            raise DataError(f"{target}: is there already and is not a demo set; choose another directory")
        if json.loads(marker.read_text()) == made_with:
            yield None
            return
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        (temporary / "demo.json").write_text(json.dumps(made_with) + "\n")
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except OSError as error:
        raise DataError(f"{error.filename or target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_split(folder: Path, split: str, count: int, seed: int, noise: float) -> None:
    for name in ("images", "audios"):
        (folder / name).mkdir(parents=True)
    records = []
    for index in range(count):
        rng = random.Random(f"demo/{seed}/{split}/{index}")
        colour, pitch = rng.choice(list(COLOURS)), rng.choice(list(PITCHES))
        paths = {"image": f"images/sample_{index}.png", "audio": f"audios/sample_{index}.wav"}
        picture(COLOURS[colour], rng).save(folder / paths["image"], compress_level=1)
        write_wav(folder / paths["audio"], tone(PITCHES[pitch], rng))
        letter = next(option[0] for option in OPTIONS if option[3:] == f"{colour} {pitch}")
        if rng.random() < noise:
            letter = rng.choice("ABCD")
        records.append(
            {
                "problem_id": index,
                "problem": PROBLEM,
                "data_type": "image_audio",
                "problem_type": "multiple choice",
                "options": OPTIONS,
                "solution": f"<answer>{letter}</answer>",
                "path": paths,
                "data_source": "demo",
            }
        )
    (folder / f"omni_rl_format_{split}.json").write_text(json.dumps(records, indent=1) + "\n")


def picture(rgb: tuple[int, int, int], rng: random.Random) -> Image.Image:
    """A square of one colour, a little off and with a little noise: (SIZE, SIZE) RGB."""
    shade = np.array(rgb) + [rng.randint(-20, 20) for _ in range(3)]
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-8, 9, (SIZE, SIZE, 3))
    return Image.fromarray(np.clip(shade + noise, 0, 255).astype(np.uint8))


def tone(hertz: float, rng: random.Random, seconds: float = SECONDS) -> np.ndarray:
    """A sine up to 5 % off the pitch, with a little noise: (RATE * seconds,) int16."""
    count = int(RATE * seconds)
    phase = 2 * np.pi * hertz * rng.uniform(0.95, 1.05) * np.arange(count) / RATE + rng.uniform(0, 2 * np.pi)
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(count)
    return ((0.4 * np.sin(phase) + 0.01 * noise) * 32767).astype("<i2")


def write_wav(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
