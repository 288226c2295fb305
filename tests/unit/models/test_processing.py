"""Prompts: ids for both sides, positions, and what is refused."""

from itertools import groupby
from pathlib import Path

import pytest
import torch

from omnitrain.data.media import load_image
from omnitrain.errors import DataError, ModelError
from omnitrain.models.qwen3_omni.processing import OverlongPrompt, Processing
from omnitrain.recipe.data import Pixels, Video
from tests.unit.models.conftest import ROWS, clip, picture, row, sound


def make(tiny_model, **kwargs):
    return Processing(str(tiny_model), **{"system": None, "max_prompt_tokens": 512, **kwargs})


@pytest.mark.parametrize("kind", ROWS)
def test_t3_engine_ids_have_one_placeholder_where_the_trainers_have_one_per_media_token(processing, kind):
    prompt = processing.encode(ROWS[kind])
    config = processing._config
    pads = {config.image_token_id, config.audio_token_id, config.video_token_id}
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
        features.get("video_grid_thw"),
        torch.ones_like(ids),
        False,
        None if mask is None else mask.sum(-1),
        torch.tensor(prompt.options.get("second_per_grid_ts", [])),
    )
    answer = prompt.positions.max() + 1 + torch.arange(3)
    assert torch.equal(whole[:, 0], torch.cat([prompt.positions, answer.expand(3, -1)], 1).float())


@pytest.mark.parametrize("kind", ["image", "audio", "image+audio", "video", "track", "pictures"])
def test_ids_positions_and_features_are_the_published_processors(tiny_model, make_policy, kind):
    """Where it can be asked: one rate for all videos, and a track in each or in none."""
    given = {**ROWS, "track": row(clip(hertz=440)), "pictures": row(picture(size=(50, 333)), picture("blue", (500, 300)))}
    processing = make(tiny_model, use_audio_in_video=True, max_prompt_tokens=2048)
    prompt = processing.encode(given[kind])
    text, media = processing._tokenizer.decode(prompt.engine_ids), prompt.media
    found = processing._processor(
        text=[text],
        images=[load_image(part, Path(".")) for part in given[kind].messages[-1].content if part.type == "image"] or None,
        videos=[frames for frames, _ in media["video"]] if "video" in media else None,
        audio=[samples for samples, _ in media["audio"]] if "audio" in media else None,
        use_audio_in_video="audio" in media,
        images_kwargs={"min_pixels": 3136, "max_pixels": 602112},
        videos_kwargs={"min_pixels": 100352, "max_pixels": 602112, "fps": 2.0},
        return_tensors="pt",
    )
    assert found["input_ids"][0].tolist() == prompt.ids
    assert prompt.options.get("second_per_grid_ts", [1.0]) == [1.0]
    names = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "input_features"}
    assert names & found.keys() == names & prompt.features.keys()
    for name in names & found.keys():
        torch.testing.assert_close(prompt.features[name], found[name])
    mask = found.get("feature_attention_mask")
    places, _ = make_policy()._thinker.get_rope_index(
        found["input_ids"],
        found.get("image_grid_thw"),
        found.get("video_grid_thw"),
        torch.ones_like(found["input_ids"]),
        kind == "track",
        None if mask is None else mask.sum(-1),
        torch.tensor([1.0]),
    )
    assert torch.equal(places[:, 0], prompt.positions.float())


def test_a_track_is_ignored_heard_within_or_heard_after_its_video(tiny_model):
    heard, silent = row(clip(hertz=440)), row(clip())
    plain, within, after = (make(tiny_model, use_audio_in_video=mode) for mode in (False, True, "separate"))
    assert plain.encode(heard).ids == plain.encode(silent).ids == within.encode(silent).ids == after.encode(silent).ids
    config = plain._config
    start, video, audio = config.audio_start_token_id, config.video_token_id, config.audio_token_id
    inside, beside = within.encode(heard), after.encode(heard)
    assert sorted(inside.ids) == sorted(beside.ids)  # the same tokens in another order
    assert inside.ids.index(start) < inside.ids.index(video) and inside.ids[inside.ids.index(audio) + 1 :].count(video)
    ends = len(beside.ids) - 1 - beside.ids[::-1].index(video)
    assert beside.ids[ends + 1 : ends + 4] == [config.vision_end_token_id, start, audio]
    assert inside.engine_ids.count(audio) == 0 and beside.engine_ids.count(audio) == 1


def test_q5_tracks_follow_their_own_videos_in_order_among_other_sounds(tiny_model):
    prompt = make(tiny_model, use_audio_in_video="separate", max_prompt_tokens=2048).encode(
        row(sound(0.5), clip(10, hertz=300), sound(0.7), clip(20), clip(30, hertz=500))
    )
    seconds = [len(samples) / 16000 for samples, _ in prompt.media["audio"]]
    assert [round(length, 1) for length in seconds] == pytest.approx([0.5, 1.0, 0.7, 3.0], abs=0.11)


def test_a_sound_beside_a_track_that_is_heard_within_is_refused_with_the_way_out(tiny_model):
    with pytest.raises(DataError, match='row-0.*data.use_audio_in_video = "separate"'):
        make(tiny_model, use_audio_in_video=True).encode(row(clip(hertz=440), sound()))
    assert make(tiny_model, use_audio_in_video=True).encode(row(clip(), sound())).media["audio"]


def test_pictures_and_frames_reach_the_engine_in_the_size_that_the_trainer_sees(tiny_model):
    bounds = Video(min_pixels=1024, max_pixels=64 * 64)
    processing = make(tiny_model, video=bounds, image=Pixels(min_pixels=1024, max_pixels=96 * 96))
    prompt = processing.encode(row(picture(size=(333, 250)), clip(size=(128, 96))))
    (image,), ((frames, _),) = prompt.media["image"], prompt.media["video"]
    (_, rows, columns), (pairs, high, wide) = (prompt.features[f"{k}_grid_thw"][0].tolist() for k in ("image", "video"))
    assert image.size == (16 * columns, 16 * rows) and image.width * image.height <= 96 * 96
    assert frames.shape == (2 * pairs, 16 * high, 16 * wide, 3) and 16 * high * 16 * wide <= 64 * 64


@pytest.mark.parametrize("media", [lambda: clip(hertz=440), lambda: sound(5.0)], ids=["video", "audio"])
def test_t2_a_long_prompt_of_any_medium_is_refused_whole(tiny_model, media):
    long = row(media())
    length = len(make(tiny_model, use_audio_in_video=True).encode(long).ids)
    for limit in (length - 1, length // 2):
        with pytest.raises(OverlongPrompt, match=f"{length} tokens, data.max_prompt_tokens is {limit}"):
            make(tiny_model, use_audio_in_video=True, max_prompt_tokens=limit).encode(long)


def test_the_spectrogram_of_a_sound_does_not_depend_on_a_longer_one_beside_it(processing):
    alone = processing.encode(row(sound(0.3)))
    beside = processing.encode(row(sound(0.3), sound(2.0)))
    assert torch.equal(alone.features["input_features"][0], beside.features["input_features"][0, :, :30])
    extractor = processing._processor.feature_extractor
    clips = [samples for samples, _ in beside.media["audio"]]
    both = extractor(clips, sampling_rate=16000, padding=True, return_tensors="pt")["input_features"]
    quirk = (both[0, :, :30] - alone.features["input_features"][0]).abs().max()
    assert quirk > 1e-3, "transformers' batches are independent by now: Features._hear may compute them at once"


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
