"""Prompts: ids for both sides, positions, and what is refused."""

from itertools import groupby

import pytest
import torch

from omnitrain.errors import DataError, ModelError
from omnitrain.models.qwen3_omni.processing import OverlongPrompt, Processing
from tests.unit.models.conftest import ROWS, picture, row, sound


def make(tiny_model, **kwargs):
    return Processing(str(tiny_model), **{"system": None, "max_prompt_tokens": 512, **kwargs})


@pytest.mark.parametrize("kind", ROWS)
def test_t3_engine_ids_have_one_placeholder_where_the_trainers_have_one_per_media_token(processing, kind):
    prompt = processing.encode(ROWS[kind])
    pads = {processing._config.image_token_id, processing._config.audio_token_id}
    collapsed = [token for token, run in groupby(prompt.ids) for _ in range(1 if token in pads else len(list(run)))]
    assert prompt.engine_ids == collapsed
    items = sum(len(items) for items in prompt.media.values())
    assert sum(prompt.engine_ids.count(pad) for pad in pads) == items
    assert (len(prompt.ids) > len(prompt.engine_ids)) == (items > 0)


@pytest.mark.parametrize("kind", ROWS)
def test_positions_continue_by_one_per_response_token(processing, make_policy, kind):
    prompt = processing.encode(ROWS[kind])
    ids = torch.tensor([prompt.ids + [1, 2, 3]])
    features = prompt.features
    mask = features.get("feature_attention_mask")
    whole, _ = make_policy()._thinker.get_rope_index(
        ids,
        features.get("image_grid_thw"),
        None,
        torch.ones_like(ids),
        False,
        None if mask is None else mask.sum(-1),
        None,
    )
    answer = prompt.positions.max() + 1 + torch.arange(3)
    assert torch.equal(whole[:, 0], torch.cat([prompt.positions, answer.expand(3, -1)], 1).float())


def test_media_for_the_engine_are_decoded_and_in_order(processing):
    prompt = processing.encode(row(picture("red"), sound(0.5), picture("blue", (96, 64)), sound(0.7)))
    assert [image.size for image in prompt.media["image"]] == [(64, 96), (96, 64)]
    assert [(len(clip), rate) for clip, rate in prompt.media["audio"]] == [(8000, 16000), (11200, 16000)]


def test_the_prompt_ends_where_the_assistant_begins(processing):
    text = processing._tokenizer.decode(processing.encode(row(text="Hi", system="Be brief.")).ids)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("system, begins", [("New.", "<|im_start|>system\nNew."), ("", "<|im_start|>user\nHi")])
def test_the_system_turn_is_replaced_or_removed(tiny_model, system, begins):
    processing = make(tiny_model, system=system)
    for had in ("Old.", None):
        text = processing._tokenizer.decode(processing.encode(row(text="Hi", system=had)).ids)
        assert text.startswith(begins) and "Old." not in text


def test_t2_a_longer_prompt_is_refused_with_its_length_and_never_cut(tiny_model):
    long = row(picture(size=(256, 256)))
    length = len(make(tiny_model).encode(long).ids)
    assert length > 64  # most of them within the picture
    with pytest.raises(OverlongPrompt, match=f"{length} tokens, data.max_prompt_tokens is {length - 1}") as error:
        make(tiny_model, max_prompt_tokens=length - 1).encode(long)
    assert error.value.tokens == length
    assert len(make(tiny_model, max_prompt_tokens=length).encode(long).ids) == length


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|audio_pad|>", "<|vision_start|>", "<|video_pad|>"])
def test_text_that_spells_a_media_token_is_refused(processing, token):
    with pytest.raises(DataError, match="row-0.*must not contain"):
        processing.encode(row(picture(), text=f"see {token}"))


def test_decoding_skips_special_tokens_and_ends_are_known(processing):
    ids = processing.encode_text("<answer>A</answer><|im_end|>")
    assert ids[-1] in processing.eos_ids
    assert processing.decode(ids) == "<answer>A</answer>"


def test_the_cache_returns_the_same_prompt_tells_rows_apart_and_stays_within_its_bytes(tiny_model):
    processing = make(tiny_model, cache_bytes=300_000)
    first = processing.encode(row(picture(), index=1))
    assert processing.encode(row(picture(), index=1)) is first
    same_content = processing.encode(row(picture(), index=2))
    assert same_content.row.index == 2 and same_content.ids is first.ids
    assert (
        processing.encode(row(picture("blue"), index=1))
        .features["pixel_values"]
        .ne(first.features["pixel_values"])
        .any()
    )
    for i in range(20):
        processing.encode(row(picture(size=(64 + i, 64))))
    assert processing._held <= 300_000 and processing._held == sum(size for _, size in processing._cache.values())


def test_a_checkpoint_without_tokenizer_is_refused(tiny_model, tmp_path):
    import shutil

    broken = shutil.copytree(tiny_model, tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        (broken / name).unlink()
    with pytest.raises(ModelError, match="no usable processor or tokenizer"):
        make(broken)
