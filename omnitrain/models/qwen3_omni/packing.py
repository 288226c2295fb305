"""Several prompts with their responses as one packed row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from omnitrain.data.sample import Prompt


@dataclass
class Packed:
    """The thinker's inputs for one packed row, and where the responses are."""

    inputs: dict[str, torch.Tensor]
    index: torch.Tensor
    """(N,) positions whose next token is a response token."""
    labels: torch.Tensor
    """(N,) those response tokens, all sequences in order."""
    sampled: torch.Tensor
    """(1, T) True where a response token stands: a media token that was sampled there is an ordinary token."""
    last: torch.Tensor
    """(B,) position of each sequence's last token."""
    media_order: dict[str, list[int]]
    """By kind, the encoded item of each item in the row, where prompts occur more than once; see towers.py."""


def pack(batch: list[tuple[Prompt, list[int]]], device: torch.device, filler: int = 0) -> Packed:
    """Pack sequences into one row of T tokens.

    `position_ids` is (4, 1, T): the text positions, restarting at 0 with every sequence, which is
    what keeps sequences from attending to each other, then three multimodal rotary rows. With
    three rows, or with an attention mask, transformers would let them attend, silently.
    An empty batch becomes one `filler` token without responses, so that its rank still takes
    part in the collectives of the forward and backward pass.
    """
    ids, text, rotary, index, labels, sampled, last, start = [], [], [], [], [], [], [], 0
    for prompt, response in batch:
        n, r = len(prompt.ids), len(response)
        ids.append(torch.tensor(prompt.ids + list(response)))
        text.append(torch.arange(n + r))
        # A response continues after the largest position of its prompt, in all three rows.
        answer = int(prompt.positions.max()) + 1 + torch.arange(r)
        rotary.append(torch.cat([prompt.positions, answer.expand(3, -1)], 1))
        index.append(start + n - 1 + torch.arange(r))
        labels.append(torch.tensor(response, dtype=torch.long))
        sampled.append(torch.arange(n + r) >= n)
        start += n + r
        last.append(start - 1)
    if not batch:
        ids, text, rotary = [torch.tensor([filler])], [torch.zeros(1).long()], [torch.zeros(3, 1).long()]
        index, labels, sampled = [torch.zeros(0).long()], [torch.zeros(0).long()], [torch.ones(1).bool()]
    positions = torch.cat([torch.cat(text)[None], torch.cat(rotary, 1)])
    media, order = _media([prompt for prompt, _ in batch])
    inputs = {"input_ids": torch.cat(ids)[None], "position_ids": positions[:, None], **media}
    move = lambda t: t.to(device, non_blocking=True)  # noqa: E731
    return Packed(
        {name: move(tensor) for name, tensor in inputs.items()},
        move(torch.cat(index)),
        move(torch.cat(labels)),
        move(torch.cat(sampled)[None]),
        move(torch.tensor(last, dtype=torch.long)),
        order,
    )


def _media(prompts: list[Prompt]) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """The media of the row's distinct prompts, in order, and the order of items that repeats them.

    Patches are concatenated, mel spectrograms padded to the longest.
    """
    distinct = list({id(p.features): p for p in prompts}.values())
    out = {}
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        if found := [p.features[name] for p in distinct if name in p.features]:
            out[name] = torch.cat(found)
    for name in ("input_features", "feature_attention_mask"):
        if found := [p.features[name] for p in distinct if name in p.features]:
            longest = max(t.shape[-1] for t in found)
            out[name] = torch.cat([pad(t, (0, longest - t.shape[-1])) for t in found])
    if len(distinct) == len(prompts):
        return out, {}
    return out, {kind: order for kind, counted in _COUNTED.items() if (order := _order(prompts, distinct, counted))}


_COUNTED = {"image": "image_grid_thw", "video": "video_grid_thw", "audio": "feature_attention_mask"}


def _order(prompts: list[Prompt], distinct: list[Prompt], counted: str) -> list[int]:
    """For each item of `prompts`, its place among those of `distinct`; items are the rows of the feature `counted`."""
    items, start = {}, 0
    for prompt in distinct:
        count = len(prompt.features.get(counted, ()))
        items[id(prompt.features)] = range(start, start + count)
        start += count
    return [index for prompt in prompts for index in items[id(prompt.features)]]
