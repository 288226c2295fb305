"""Media of a group's responses: encoded once, with the results of encoding them each time."""

import dataclasses

import pytest
import torch

from omnitrain.models.qwen3_omni.packing import pack
from tests.unit.models.conftest import clip, picture, row, sound


@pytest.fixture(scope="module")
def group(processing):
    """Two prompts with two pictures, a sound and a video each or not, their responses mixed."""
    full = processing.encode(row(picture(), clip(), picture("blue", (96, 64)), sound(0.4)))
    other = processing.encode(row(sound(1.3), picture("green"), index=1))
    text = processing.encode(row(index=2))
    prompts = [full, other, full, text, other, full]
    return [(prompt, [index + 1, 7]) for index, prompt in enumerate(prompts)]


def test_each_distinct_prompt_is_encoded_once(group):
    packed = pack(group, torch.device("cpu"))
    assert len(packed.inputs["image_grid_thw"]) == 3 and len(packed.inputs["video_grid_thw"]) == 1
    assert len(packed.inputs["feature_attention_mask"]) == 2
    assert packed.media_order == {"image": [0, 1, 2, 0, 1, 2, 0, 1], "video": [0, 0, 0], "audio": [0, 1, 0, 1, 0]}
    assert pack(group[:2], torch.device("cpu")).media_order == {}


def test_log_probs_are_those_of_media_encoded_each_time(group, lora_policy):
    apart = [(dataclasses.replace(prompt, features=dict(prompt.features)), answer) for prompt, answer in group]
    with torch.no_grad():
        once, _ = lora_policy.logprobs(group)
        each, _ = lora_policy.logprobs(apart)
        alone = torch.cat([lora_policy.logprobs([pair])[0] for pair in group])
    torch.testing.assert_close(once, each, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(once, alone, atol=1e-5, rtol=1e-5)
