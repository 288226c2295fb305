"""The audio tower's features, equal to the engine's and independent of what else is in the batch.

Two things decide a clip's features besides its own samples:

Windows. The tower attends within windows of `n_window_infer` mel frames. transformers (5.14, 5.17)
splits by window for every attention implementation; earlier versions attended over the whole clip
under SDPA, silently (cosine 0.92 to the engine). test_k5 holds the library to it.

Padding. Before the convolutions transformers cuts clips into chunks of 2 * n_window frames and pads
the chunks of a batch to the longest. Padding leaks into the last frame of a short chunk. A clip of at
least one whole chunk always sees the same padding; a shorter one is padded only when a longer one is
in the batch, so that its features depend on its neighbours. Here short clips are encoded with clips
of their own length only, which is what the engine computes for one request.
"""

from __future__ import annotations

from collections import defaultdict
from types import MethodType

import torch


def attach(thinker) -> None:
    """Make `thinker.get_audio_features` independent of the batch."""
    original = thinker.get_audio_features
    chunk = 2 * thinker.config.audio_config.n_window

    def get_audio_features(self, input_features, feature_attention_mask=None, audio_feature_lengths=None, **kwargs):
        input_features = input_features.to(self.audio_tower.conv2d1.weight.dtype)
        frames = feature_attention_mask.sum(-1).tolist()
        groups = defaultdict(list)
        for i, n in enumerate(frames):
            groups[min(n, chunk)].append(i)
        if len(groups) == 1:
            return original(input_features, feature_attention_mask, audio_feature_lengths, **kwargs)
        clips: list[torch.Tensor | None] = [None] * len(frames)
        for members in groups.values():
            output = original(input_features[members], feature_attention_mask[members], None, **kwargs)
            lengths = [tokens(frames[i], chunk) for i in members]
            for i, clip in zip(members, output.last_hidden_state.split(lengths), strict=True):
                clips[i] = clip
        output.last_hidden_state = torch.cat(clips)
        return output

    thinker.get_audio_features = MethodType(get_audio_features, thinker)


def tokens(frames: int, chunk: int = 100) -> int:
    """Audio tokens of a clip of `frames` mel frames: three halving convolutions per chunk."""

    def halved(n: int) -> int:
        for _ in range(3):
            n = (n - 1) // 2 + 1
        return n

    whole, rest = divmod(frames, chunk)
    return whole * halved(chunk) + (halved(rest) if rest else 0)
