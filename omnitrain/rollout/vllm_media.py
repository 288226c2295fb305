"""Mends of vLLM-Omni's Qwen3-Omni for media, each with its symptom; tests/integration/test_modalities.py fails when one is gone.

The symptoms were seen on the pair 0.30; the code of 0.26 has the same faults but where a version is named. The replaced
functions keep what they replace in `.upstream`. A mend reads upstream's arguments by their names. Where a version has
others, it is left out with a warning, and the gates G6 and G7 tell whether it is missed.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_MODULE = "vllm_omni.model_executor.models.qwen3_omni.qwen3_omni_moe_thinker"


def mend() -> None:
    """Replace what is wrong, once per process. Call before the engine is built."""
    import importlib

    module = importlib.import_module(_MODULE)
    thinker = module.Qwen3OmniMoeThinkerForConditionalGeneration
    processor = module.Qwen3OmniMoeThinkerMultiModalProcessor
    _replace(module.Qwen3OmniMoeThinkerProcessingInfo, "get_hf_processor", _sounds_one_by_one)
    _replace(processor, "_apply_hf_processor_main", _per_video_seconds)
    _replace(processor, "_get_mm_fields_config", _kept_flags)
    _replace(thinker, "_compute_interleaved_positions", _positions_in_order_of_ids)
    _replace(thinker, "embed_input_ids", _pictures_beside_tracks)
    _replace(thinker, "_process_audio_input", _short_clips_apart)


def _replace(owner: type, name: str, mended: Callable) -> None:
    """Put `mended(upstream, self, ...)` in place of the method `name`.

    Its further parameters are those of upstream's arguments that it reads. `upstream(**changed)` calls what was
    replaced with the call's own arguments but for the changed ones.
    """
    original = getattr(owner, name, None)
    if hasattr(original, "upstream"):
        return
    signature = inspect.signature(original) if original else inspect.Signature()
    read = [*inspect.signature(mended).parameters][2:]
    if missing := [name] if original is None else [one for one in read if one not in signature.parameters]:
        place, lacking = f"{owner.__name__}.{name}", ", ".join(missing)
        _log.warning("%s: this vllm-omni has no %s; the mend %s is left out", place, lacking, mended.__name__)
        return

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()

        def upstream(**changed):
            bound.arguments.update(changed)
            return original(*bound.args, **bound.kwargs)

        return mended(upstream, self, *(bound.arguments[one] for one in read))

    method.upstream = original
    setattr(owner, name, method)


def _per_video_seconds(upstream, processor, hf_processor_mm_kwargs) -> Any:
    """Every video its own seconds per frame pair.

    Symptom: "Mixed sampled FPS": all videos of a prompt get the first one's seconds, and so wrong rotary positions.
    0.30 returns the features, 0.26 (ids, features, whether the ids are expanded).
    """
    import torch

    seconds = hf_processor_mm_kwargs.get("second_per_grid_ts")
    kwargs = {key: value for key, value in hf_processor_mm_kwargs.items() if key != "second_per_grid_ts"}
    if seconds and "videos_kwargs" in kwargs:  # any rate will do, and silences the warning
        kwargs["videos_kwargs"] = {"fps": 2.0} | kwargs["videos_kwargs"]
    found = upstream(hf_processor_mm_kwargs=kwargs)
    features = found[1] if isinstance(found, tuple) else found
    if seconds and "second_per_grid_ts" in features:
        features["second_per_grid_ts"] = torch.tensor(seconds, dtype=torch.float32)
    return found


def _sounds_one_by_one(upstream, info) -> Any:
    """A processor that computes the spectrograms of a prompt clip by clip.

    Symptom: the last frame of a sound depends on whether a longer one is in the prompt (the transform mirrors the end of
    the longest, and sees zeros after the end of the others), but is cached for prompts where none is.
    """
    import torch
    from torch.nn.functional import pad

    found = upstream()
    extractor = found.feature_extractor
    if hasattr(extractor, "one_by_one"):
        return found

    class OneByOne(type(extractor)):
        one_by_one = True

        def __call__(self, sounds, *args, **kwargs):
            if not isinstance(sounds, (list, tuple)):
                return super().__call__(sounds, *args, **kwargs)
            each = [super(OneByOne, self).__call__([sound], *args, **kwargs) for sound in sounds]
            first = each[0]
            for name in first:
                parts = [torch.as_tensor(one[name]) for one in each]
                longest = max(part.shape[-1] for part in parts)
                first[name] = torch.cat([pad(part, (0, longest - part.shape[-1])) for part in parts])
            return first

    extractor.__class__ = OneByOne
    return found


def _kept_flags(upstream, processor, hf_inputs) -> Any:
    """The flag of a video whose track is heard stays with it when its features are cached already.

    Symptom: several videos in a prompt: "Position ids length mismatch with input ids length" for a group's second
    response (0.30: only what a field keeps on the CPU is kept at all).
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig

    fields = dict(upstream())
    flags = hf_inputs.get("use_audio_in_video")
    if flags is not None and getattr(flags, "numel", lambda: 1)() > 1:
        fields["use_audio_in_video"] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
    return fields


def _positions_in_order_of_ids(upstream, model, start_idx, data) -> Any:
    """Positions of a video with its track, merged as the ids are: by times that are not rounded.

    Symptom: where a frame pair is not a whole number of positions after the last (frames at other rates than 1 or 2 a
    second), ids come in one order and positions in another: log-probs off by more than 1.
    """
    import numpy as np

    pairs, height, width = data["grid_t"], data["grid_h"], data["grid_w"]
    videos = pairs * height * width
    sounds = int(data["placeholder_len"]) - videos - 2
    times = np.repeat(np.arange(pairs) * data["t_factor"], height * width)
    places = np.indices((pairs, height, width)).reshape(3, -1)
    places[0] = times.astype(np.int64)
    both = np.concatenate([places, np.broadcast_to(np.arange(sounds), (3, sounds))], axis=1)
    # Video first where equal; lexsort's last key is the first to count.
    order = np.lexsort([np.arange(videos + sounds) >= videos, np.concatenate([times, np.arange(sounds)])])
    return both[:, order] + start_idx, videos + sounds


def _pictures_beside_tracks(upstream, model, input_ids, multimodal_embeddings, is_multimodal) -> "torch.Tensor":
    """Embeddings by kind, where a video is heard with its track.

    Symptom: a picture in the same batch, even of another request: "Attempted to assign 18 + 6 = 24 multimodal tokens to
    18 placeholders", since upstream then counts video tokens only.
    """
    import torch
    from vllm.model_executor.models.qwen2_5_omni_thinker import check_interleaved_audio_video
    from vllm.multimodal.utils import get_mm_embedding_modalities

    if not multimodal_embeddings:
        return upstream()
    media, config = is_multimodal.to(input_ids.device), model.config
    masks = {kind: media & (input_ids == getattr(config, f"{kind}_token_id")) for kind in ("image", "video", "audio")}
    counts = {kind: int(mask.sum()) for kind, mask in masks.items()}
    if not check_interleaved_audio_video(masks["video"], masks["audio"], counts["video"], counts["audio"]):
        return upstream()
    embeds = model._embed_text_input_ids(input_ids, model.language_model.embed_input_ids, is_multimodal=is_multimodal)
    width, levels = embeds.shape[-1], model.deepstack_num_level
    deep = embeds.new_zeros(embeds.shape[0], levels * width)
    kinds = get_mm_embedding_modalities(multimodal_embeddings)
    for kind, mask in masks.items():
        share = [one for one, of in zip(multimodal_embeddings, kinds) if of == kind]
        if not share:
            continue
        found = torch.cat(share).to(embeds.dtype)
        embeds[mask] = found[:, :width]
        if levels and kind != "audio":
            deep[mask] = found[:, width:]
    if levels:
        model._set_deepstack_input_embeds(deep.view(-1, levels, width).permute(1, 0, 2).contiguous())
    return embeds


def _short_clips_apart(upstream, model, audio_input) -> Any:
    """Clips shorter than one chunk of the audio tower (1 s) are encoded with clips of their own length only.

    Symptom: a clip's features depend on the other clips that are encoded at the same time, since the convolutions see
    the padding up to the longest: log-probs off by 0.1 to 1, by what happens to be in the batch.
    """
    import torch

    lengths = audio_input["audio_feature_lengths"].flatten().tolist()
    chunk = 2 * model.audio_tower.n_window
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(min(length, chunk), []).append(index)
    features = audio_input["input_features"]
    if len(groups) == 1 or not isinstance(features, torch.Tensor) or features.ndim != 2:
        return upstream()
    clips = features.split(lengths, dim=1)
    found: list = [None] * len(lengths)
    for members in groups.values():
        share = {  # all that upstream reads
            "input_features": torch.cat([clips[i] for i in members], dim=1),
            "audio_feature_lengths": audio_input["audio_feature_lengths"].flatten()[members],
        }
        for index, clip in zip(members, upstream(audio_input=share), strict=True):
            found[index] = clip
    return tuple(found)
