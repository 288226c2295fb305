"""Rows of every modality with inline media, and policies over the tiny model."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from omnitrain.data.sample import Message, Part, Row
from omnitrain.data.video import encode_video
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.models.qwen3_omni.spec import Lora, Qwen3OmniModel


def picture(colour="red", size=(64, 96)) -> Part:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return Part("image", data=file.getvalue())


def sound(seconds=0.5, hertz=440.0) -> Part:
    wave = 0.3 * np.sin(2 * np.pi * hertz * np.arange(int(16000 * seconds)) / 16000)
    file = io.BytesIO()
    soundfile.write(file, wave.astype(np.float32), 16000, format="WAV", subtype="FLOAT")
    return Part("audio", data=file.getvalue())


def clip(pictures=20, fps=10, hertz=None, size=(64, 96), seed=0) -> Part:
    """A video whose frames differ; with `hertz`, a tone in its track."""
    blocks = np.random.default_rng(seed).integers(0, 256, (pictures, size[1] // 32, size[0] // 32, 3), dtype=np.uint8)
    time = np.arange(16000 * pictures // fps) / 16000
    tone = None if hertz is None else 0.3 * np.sin(2 * np.pi * hertz * time)
    return Part("video", data=encode_video(blocks.repeat(32, 1).repeat(32, 2), fps, tone))


def row(*parts: Part, text="Which one?", index=0, system=None) -> Row:
    messages = [Message("system", (Part("text", text=system),))] if system else []
    messages.append(Message("user", (*parts, Part("text", text=text))))
    return Row(f"row-{index}", tuple(messages), "A", "test", {}, Path("."), index)


ROWS = {
    "text": row(text="A longer question, so that lengths differ?"),
    "image": row(picture("blue")),
    "audio": row(sound(1.3)),
    "image+audio": row(picture("red", (128, 64)), sound(0.37, 300)),
    "short audio": row(sound(0.21, 900)),
    "video": row(clip()),
}
ANSWERS = [[11, 500, 7], [42], [300, 2, 2, 9, 77], [5, 6], [1000, 1, 15], [12, 13]]


@pytest.fixture(scope="session")
def processing(tiny_model):
    return Processing(str(tiny_model), system=None, max_prompt_tokens=512)


@pytest.fixture(scope="session")
def batch(processing):
    """(prompt, response) of every modality."""
    return [(processing.encode(r), answer) for r, answer in zip(ROWS.values(), ANSWERS, strict=True)]


@pytest.fixture
def make_policy(tiny_model):
    def make(lora=None, dtype="float32", path=tiny_model, checkpointing=False, seed=0, noise=0.0):
        spec = Qwen3OmniModel(family="qwen3_omni", path=str(path), dtype=dtype, lora=lora)
        policy = ThinkerPolicy(
            spec, mesh=None, device=torch.device("cpu"), seed=seed, gradient_checkpointing=checkpointing
        )
        disturb(policy, noise)
        return policy

    return make


@pytest.fixture
def lora_policy(make_policy):
    """With adapters that matter: their B matrices are not zero."""
    return make_policy(Lora(rank=4, alpha=8), noise=0.1)


@torch.no_grad()
def disturb(policy: ThinkerPolicy, scale: float) -> None:
    for i, (_, parameter) in enumerate(policy.trainable()):
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)), alpha=scale)
