"""The audio tower: windows are attended to separately, and a clip does not feel its neighbours in the batch."""

import pytest
import torch

from omnitrain.models.qwen3_omni import audio


@torch.no_grad()
def features(policy, *clips):
    longest = max(c.shape[1] for c in clips)
    mel = torch.stack([torch.nn.functional.pad(c, (0, longest - c.shape[1])) for c in clips])
    mask = torch.stack([(torch.arange(longest) < c.shape[1]).long() for c in clips])
    found = policy._thinker.get_audio_features(mel, mask, return_dict=True).last_hidden_state
    return found.split([audio.tokens(c.shape[1]) for c in clips])


def mel(frames: int, seed: int) -> torch.Tensor:
    return torch.randn(32, frames, generator=torch.Generator().manual_seed(seed))


def test_k5_changing_the_second_window_leaves_the_first_unchanged(make_policy):
    policy = make_policy()
    window, clip = 800, mel(1300, 0)  # n_window_infer mel frames are one window, 104 tokens
    changed = torch.cat([clip[:, :window], mel(500, 1)], 1)
    (one,), (other,) = features(policy, clip), features(policy, changed)
    assert torch.equal(one[:104], other[:104])
    assert not torch.allclose(one[104:], other[104:], atol=1e-2)
    earlier = torch.cat([mel(100, 2), clip[:, 100:]], 1)
    assert not torch.allclose(features(policy, earlier)[0][90:104], one[90:104], atol=1e-4)  # within a window it does


@pytest.mark.parametrize("frames", [(38, 150, 52, 38), (1300, 20), (99, 100)])
def test_a_clip_alone_and_among_others_has_the_same_features(make_policy, frames):
    policy = make_policy()
    clips = [mel(n, i) for i, n in enumerate(frames)]
    for clip, found in zip(clips, features(policy, *clips), strict=True):
        torch.testing.assert_close(found, features(policy, clip)[0], atol=2e-5, rtol=1e-5)


def test_transformers_alone_lets_a_short_clip_feel_a_longer_one(tiny_model):
    """The quirk that `attach` is for; when this fails, transformers has mended it."""
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    class Plain:
        _thinker = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(tiny_model, dtype=torch.float32).eval()

    alone, beside = features(Plain, mel(38, 0))[0], features(Plain, mel(38, 0), mel(150, 1))[0]
    assert (alone - beside).abs().max() > 1e-3


@pytest.mark.parametrize("frames", [1, 7, 8, 9, 50, 99, 100, 101, 250, 1300])
def test_token_counts_are_those_of_transformers(frames):
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    assert audio.tokens(frames) == int(_get_feat_extract_output_lengths(torch.tensor(frames)))
