"""Media that several sequences of a packed row share (the responses of one group) are encoded once."""

from __future__ import annotations

from types import MethodType

import torch

from omnitrain.models.qwen3_omni.audio import tokens

KINDS = ("image", "video", "audio")


def attach(thinker) -> None:
    """Make the thinker repeat its towers' outputs by `thinker.media_order`: for each kind, which encoded item stands where.

    Without an order, or with one that lacks a kind, the outputs stay as they are. Attach after what changes the towers'
    outputs themselves.
    """
    for kind in KINDS:
        _wrap(thinker, kind)
    thinker.media_order = {}


def _wrap(thinker, kind: str) -> None:
    original = getattr(thinker, f"get_{kind}_features")

    def get_features(self, features, shape=None, *args, **kwargs):
        output = original(features, shape, *args, **kwargs)
        order = self.media_order.get(kind)
        if order is None:
            return output
        if kind == "audio":
            sizes = [tokens(frames, 2 * self.config.audio_config.n_window) for frames in shape.sum(-1).tolist()]
            output.last_hidden_state = _repeat(output.last_hidden_state, sizes, order)
            return output
        sizes = (shape.prod(-1) // self.config.vision_config.spatial_merge_size**2).tolist()
        if isinstance(output.pooler_output, torch.Tensor):
            output.pooler_output = _repeat(output.pooler_output, sizes, order)
        else:  # transformers 5.17: item by item, concatenated by the caller
            output.pooler_output = [output.pooler_output[index] for index in order]
        output.deepstack_features = [_repeat(level, sizes, order) for level in output.deepstack_features]
        return output

    setattr(thinker, f"get_{kind}_features", MethodType(get_features, thinker))


def _repeat(encoded: torch.Tensor, sizes: list[int], order: list[int]) -> torch.Tensor:
    items = encoded.split(sizes)
    return torch.cat([items[index] for index in order])
