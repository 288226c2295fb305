"""A small data set in Omni-Preference's published layout: which of two descriptions of a medium is the right one.

A third of the pairs is about the colour of a picture, a third about the pitch of a sound, a third about the motion in
a clip. The right description is candidate A or B with equal chance, and each of the two is right equally often, so
only a model that looks or listens can tell them apart.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from omnitrain.data.demo import COLOURS, PITCHES, demo_folder, picture, tone, write_wav
from omnitrain.data.demo_clips import MOTIONS, write_clip

QUESTIONS = {"image": "Which colour?", "audio": "Which pitch?", "video": "Which motion?"}
CHOICES = {"image": tuple(COLOURS), "audio": tuple(PITCHES), "video": MOTIONS[:2]}
_FILES = {
    "image": "rlaif-v-dataset/demo/{}.png",
    "audio": "audio_files/audio_files/{}.wav",
    "video": "academic_source/demo/{}.mp4",
}
_WINS, _LOSES = 8, 3
_JUDGE = (
    "You compare two answers to a question about a file. Score both from 0 to 10 and say which one is better."
    "\n\n### Context\n{label} file: {path}\nQuestion: {question}\nCandidate A: {a}\nCandidate B: {b}"
)


def describe(choice: str) -> str:
    """The answer that names a choice."""
    return f"It is {choice}."


def write_preference(folder: Path, *, rows: int = 768, seed: int = 0, shuffled: bool = False) -> Path:
    """Write folder/Omni-Preference with `rows` pairs, images, sounds and videos in turn; returns it.

    shuffled: draw every pair's verdict at random: a control that nothing can be learned from.

    The same arguments give the same files, and find them when they are already there. DataError when
    an Omni-Preference that is not a demo set is in the way.
    """
    with demo_folder(folder / "Omni-Preference", rows=rows, seed=seed, shuffled=shuffled) as target:
        if target is not None:
            for number, kind in enumerate(QUESTIONS):
                _write_kind(target, kind, range(number, rows, len(QUESTIONS)), seed, shuffled)
    return folder / "Omni-Preference"


def _write_kind(folder: Path, kind: str, indices: range, seed: int, shuffled: bool) -> None:
    records = []
    for index in indices:
        rng = random.Random(f"demo/preference/{seed}/{index}")
        right, wrong = rng.sample(CHOICES[kind], 2)
        path = _FILES[kind].format(index)
        _write_media(folder / ("video-dataset" if kind == "video" else "") / path, kind, right, rng)
        if shuffled:
            right, wrong = rng.sample((right, wrong), 2)
        better = rng.choice("AB")
        texts = (right, wrong) if better == "A" else (wrong, right)
        scores = (_WINS, _LOSES) if better == "A" else (_LOSES, _WINS)
        # The published paths begin so, and name sounds by another folder than the one they lie in.
        path = f"/data/audio/{index}.wav" if kind == "audio" else f"/data/{path}"
        a, b = map(describe, texts)
        prompt = _JUDGE.format(label=kind.capitalize(), path=path, question=QUESTIONS[kind], a=a, b=b)
        solution = {"score_A": scores[0], "score_B": scores[1], "better": better, "reasoning": f"It is {right}."}
        solution["final_verdict"] = f"<answer>[[{better}]]</answer>"
        message = {"role": "user", "content": f"<{kind}>{prompt}"}
        records.append({f"{kind}s": [path], "messages": [message], "solution": json.dumps(solution)})
    table = folder / "dataset_jsonl" / kind / "final_rl_data.jsonl"
    table.parent.mkdir(parents=True)
    table.write_text("".join(json.dumps(record) + "\n" for record in records))


def _write_media(path: Path, kind: str, right: str, rng: random.Random) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "image":
        picture(COLOURS[right], rng).save(path, compress_level=1)
    elif kind == "audio":
        write_wav(path, tone(PITCHES[right], rng))
    else:
        write_clip(path, rng.choice(list(COLOURS)), right, sound=rng.random() < 0.5, rng=rng)
