"""A mend fits the signature of every supported vllm-omni, and is left out, with a word, where it fits none."""

import logging

import pytest
import torch

from omnitrain.rollout import vllm_media


class Of30:
    def _apply_hf_processor_main(self, mm_items, hf_processor_mm_kwargs):
        assert mm_items == "items"
        return {"second_per_grid_ts": torch.ones(2), "given": hf_processor_mm_kwargs}


class Of26:
    """Also takes the prompt, and returns the features between ids and a flag."""

    def _apply_hf_processor_main(
        self, prompt, mm_items, hf_processor_mm_kwargs, tokenization_kwargs, *, enable_hf_prompt_update
    ):
        assert (prompt, tokenization_kwargs, enable_hf_prompt_update) == ([1], {}, True)
        return [1], Of30()._apply_hf_processor_main(mm_items, hf_processor_mm_kwargs), False


@pytest.mark.parametrize("owner, more", [
    (Of30, {}),
    (Of26, {"prompt": [1], "tokenization_kwargs": {}, "enable_hf_prompt_update": True}),
])  # fmt: skip
def test_videos_keep_their_own_seconds_under_both_signatures(owner, more):
    class Processor(owner):
        pass

    vllm_media._replace(Processor, "_apply_hf_processor_main", vllm_media._per_video_seconds)
    kwargs = {"second_per_grid_ts": [0.5, 2.0], "videos_kwargs": {"do_resize": False}}
    found = Processor()._apply_hf_processor_main(mm_items="items", hf_processor_mm_kwargs=kwargs, **more)
    features = found[1] if owner is Of26 else found
    assert features["second_per_grid_ts"].tolist() == [0.5, 2.0]
    assert features["given"] == {"videos_kwargs": {"fps": 2.0, "do_resize": False}}


def test_a_second_mend_changes_nothing():
    class Processor(Of30):
        pass

    for _ in range(2):
        vllm_media._replace(Processor, "_apply_hf_processor_main", vllm_media._per_video_seconds)
    assert Processor._apply_hf_processor_main.upstream is Of30._apply_hf_processor_main


def test_a_mend_is_left_out_with_a_warning_where_upstream_lacks_what_it_reads(caplog):
    class Other:
        def _apply_hf_processor_main(self, everything):
            return everything

    with caplog.at_level(logging.WARNING):
        vllm_media._replace(Other, "_apply_hf_processor_main", vllm_media._per_video_seconds)
        vllm_media._replace(Other, "embed_input_ids", vllm_media._pictures_beside_tracks)
    assert Other()._apply_hf_processor_main(3) == 3 and not hasattr(Other, "embed_input_ids")
    assert "no hf_processor_mm_kwargs; the mend _per_video_seconds is left out" in caplog.text
    assert "no embed_input_ids; the mend _pictures_beside_tracks is left out" in caplog.text
