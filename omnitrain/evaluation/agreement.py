"""Prompts of every modality for measuring how far the engine and the trainer are apart, and the table of the result.

`omnitrain bench RECIPE --agreement` and the doctor's engine check use it. The prompts are drawn, so that
every modality is measured whatever the recipe's own data holds. Imports no torch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from omnitrain.recipe.schema import Recipe

MODALITIES = ("text", "image", "audio", "video", "video+track", "image+audio", "image+audio+video")
"""What is drawn; a row's `source` says which of them it is. The track of "video+track" is heard as the recipe has it."""

LONGEST = 1024
"""Prompt tokens that the drawn rows are given room for, whatever the recipe's rows need."""
COLUMNS = ("pearson", "abs_mean", "abs_max", "k3", "log_ppl_diff")
_QUESTIONS = ("What is here?", "Describe it in one word, please.", "Count up: 1 2 3 4 5", "Is it more than the last one?")
RATE = 16000


def agreement_recipe(recipe: Recipe, folder: Path, *, dtype: str | None = None, per_modality: int = 2) -> Recipe:
    """The recipe with drawn prompts as its data, written to `folder`, and another dtype if one is given.

    Rewards are replaced by one that needs nothing, since no response is scored.
    """
    from omnitrain.recipe.loader import resolved, validated

    data = resolved(recipe).plain()
    data["data"] |= {"train": str(write_prompts(folder / "prompts.parquet", per_modality)), "overlong": "error"}
    data["data"]["max_prompt_tokens"] = max(recipe.data.max_prompt_tokens, LONGEST)
    data["train"]["max_tokens_per_device"] = max(recipe.train.max_tokens_per_device, 2 * LONGEST)
    for name in ("validation", "train_weights"):
        data["data"].pop(name, None)
    data["checkpoint"].pop("keep_best", None)  # it may name a metric of the validation
    data["rewards"] = [{"kind": "choice"}]
    data["model"]["dtype"] = dtype or recipe.model.dtype
    data["trackers"] = {}
    return validated(data)


def write_prompts(path: Path, per_modality: int = 2, modalities: tuple[str, ...] = MODALITIES) -> Path:
    """Write `per_modality` rows of each modality, their media inline; returns `path`."""
    from omnitrain.data.schema import system_hash, write_rows

    write_rows(path, _rows(per_modality, modalities), system_hash=system_hash(None))
    return path


def table(found: list[dict[str, Any]]) -> str:
    """Lines of text from what `omnitrain.train.bench` measured: one per dtype and modality."""
    head = f"{'dtype':<10}{'modality':<18}{'tokens':>7}" + "".join(f"{name:>14}" for name in COLUMNS)
    lines = [head, "-" * len(head)]
    for line in found:
        numbers = f"{line['pearson']:>14.7f}" + "".join(f"{line[name]:>14.2e}" for name in COLUMNS[1:])
        lines.append(f"{line['dtype']:<10}{line['modality']:<18}{line['tokens']:>7}{numbers}")
    return "\n".join(lines)


def _rows(per_modality: int, modalities: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for modality in modalities:
        for index in range(per_modality):
            rng = np.random.default_rng([MODALITIES.index(modality), index])
            content = []
            if "image" in modality:
                content.append({"type": "image", "data": _picture(rng, index)})
            if "audio" in modality:
                content.append({"type": "audio", "data": _wav(_sound(rng, 0.4 + 0.3 * (index % 3)))})
            if "video" in modality:
                content.append({"type": "video", "data": _clip(rng, index, track="track" in modality)})
            content.append({"type": "text", "text": _QUESTIONS[index % len(_QUESTIONS)]})
            yield {
                "id": f"{modality}-{index}",
                "messages": [{"role": "user", "content": content}],
                "answer": "<answer>A</answer>",
                "source": modality,
                "meta": {},
            }


def _picture(rng: np.random.Generator, index: int) -> bytes:
    """A PNG of coarse random blocks; the sizes differ, so that a wrong position or a wrong grid shows."""
    from PIL import Image

    blocks = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    blocks.resize((64 + 32 * (index % 3), 64 + 64 * (index % 2)), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def _sound(rng: np.random.Generator, seconds: float) -> np.ndarray:
    """(n,) float32: one tone in noise."""
    time = np.arange(int(RATE * seconds)) / RATE
    return (0.4 * np.sin(2 * np.pi * rng.uniform(200, 3000) * time) + 0.05 * rng.standard_normal(len(time))).astype(np.float32)


def _wav(samples: np.ndarray) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def _clip(rng: np.random.Generator, index: int, *, track: bool) -> bytes:
    """An MP4 of random blocks that change. Its frames are chosen at odd times, so that rounded ones would show."""
    from omnitrain.data.video import encode_video

    rate, count = (7, 15 + 9 * (index % 3))
    blocks = rng.integers(0, 256, (count, 2, 2 + index % 2, 3), dtype=np.uint8)
    return encode_video(blocks.repeat(32, 1).repeat(32, 2), rate, _sound(rng, count / rate) if track else None)
