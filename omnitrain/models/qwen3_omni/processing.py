"""Rows to prompts: chat template, media decoding, Qwen3-Omni's processor, rotary positions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from omnitrain.data.media import load_audio, load_image
from omnitrain.data.sample import Message, Part, Prompt, Row
from omnitrain.errors import DataError, ModelError
from omnitrain.models.qwen3_omni.weights import Checkpoint

RATE = 16000
_FEATURES = ("pixel_values", "image_grid_thw", "input_features", "feature_attention_mask")


class OverlongPrompt(Exception):
    """A prompt is longer than allowed. `tokens` is its length, media tokens included."""

    def __init__(self, row: Row, tokens: int, limit: int) -> None:
        super().__init__(f"row {row.id!r}: the prompt has {tokens} tokens, data.max_prompt_tokens is {limit}")
        self.tokens = tokens


class Processing:
    """Turns rows into prompts for the trainer and the engine, and ids back into text.

    Args:
        path: `model.path`: a checkpoint directory or a hub name in the local cache.
        system: replaces the system turn of every row; an empty string removes it; None keeps it.
        max_prompt_tokens: longest prompt; a longer one raises OverlongPrompt and is never cut.
        cache_bytes: how much the prompts kept for reuse may hold.

    Raises ModelError if the checkpoint has no usable processor.
    """

    def __init__(self, path: str, *, system: str | None, max_prompt_tokens: int, cache_bytes: int = 2**30) -> None:
        from transformers import AutoProcessor, GenerationConfig

        checkpoint = Checkpoint(path)
        try:
            self._processor = AutoProcessor.from_pretrained(checkpoint.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{checkpoint.path}: no usable processor or tokenizer ({error}); copy the checkpoint again"
            ) from error
        self._tokenizer = self._processor.tokenizer
        self._config = checkpoint.config.thinker_config
        self._rope = _Rope(self._config)
        self._system = system
        self._limit = max_prompt_tokens
        self._cache: OrderedDict[Any, tuple[Prompt, int]] = OrderedDict()
        self._cache_bytes, self._held = cache_bytes, 0
        self.eos_ids: set[int] = _eos_ids(checkpoint.path, self._tokenizer, GenerationConfig)
        """Ids that end a response: the generation config's, else the tokenizer's."""

    # -- text

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, without template; special tokens in it are taken as such."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def response_ids(self, text: str) -> list[int]:
        """Ids of a response that says `text` and ends, as the model would have sampled it."""
        return [*self.encode_text(text), self._tokenizer.eos_token_id]

    def decode(self, ids: list[int]) -> str:
        """Text of response ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    # -- rows

    def encode(self, row: Row) -> Prompt:
        """The prompt of a row, from the cache if it was asked for lately.

        Raises OverlongPrompt, or DataError for media that cannot be read or text that holds media tokens.
        """
        key = (row.root, row.messages)
        if key in self._cache:
            self._cache.move_to_end(key)
            prompt = self._cache[key][0]
            return prompt if prompt.row == row else Prompt(**{**vars(prompt), "row": row})
        prompt = self._encode(row)
        self._keep(key, prompt)
        return prompt

    def _encode(self, row: Row) -> Prompt:
        messages = self.messages(row)
        parts = [part for message in messages for part in message.content]
        text = self._processor.apply_chat_template(
            [{"role": m.role, "content": _template_content(m.content)} for m in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        images = [load_image(part, row.root) for part in parts if part.type == "image"]
        clips = [load_audio(part, row.root, RATE) for part in parts if part.type == "audio"]
        if any(part.type == "video" for part in parts):
            raise DataError(f"row {row.id!r}: video is not supported yet; leave such rows out")
        engine_ids = self.encode_text(text)
        self._check_placeholders(row, engine_ids, len(images), len(clips))
        batch = self._processor(text=[text], images=images or None, audio=clips or None, return_tensors="pt")
        ids = batch["input_ids"][0].tolist()
        if len(ids) > self._limit:
            raise OverlongPrompt(row, len(ids), self._limit)
        features = {name: batch[name] for name in _FEATURES if name in batch}
        media: dict[str, Any] = {}
        if images:
            media["image"] = images
        if clips:
            media["audio"] = [(clip, RATE) for clip in clips]
        return Prompt(row, ids, engine_ids, media, features, self._rope.positions(batch["input_ids"], features))

    def messages(self, row: Row) -> list[Message]:
        """The row's messages as the model sees them: their system turn is `data.system`, if that is set."""
        if self._system is None:
            return list(row.messages)
        rest = [message for message in row.messages if message.role != "system"]
        own = [Message("system", (Part("text", text=self._system),))] if self._system else []
        return own + rest

    def _check_placeholders(self, row: Row, engine_ids: list[int], images: int, clips: int) -> None:
        """One placeholder per media item. More means that the row's text spells a media token."""
        for kind, token, expected in (
            ("image", self._config.image_token_id, images),
            ("image", self._config.vision_start_token_id, images),
            ("audio", self._config.audio_token_id, clips),
            ("audio", self._config.audio_start_token_id, clips),
            ("video", self._config.video_token_id, 0),
        ):
            found = engine_ids.count(token)
            if found != expected:
                raise DataError(
                    f"row {row.id!r}: {found} {kind} placeholders for {expected} {kind} parts; "
                    f"its text must not contain {self._tokenizer.convert_ids_to_tokens(token)!r}"
                )

    def _keep(self, key: Any, prompt: Prompt) -> None:
        size = _bytes(prompt)
        self._cache[key] = (prompt, size)
        self._held += size
        while self._held > self._cache_bytes and len(self._cache) > 1:
            self._held -= self._cache.popitem(last=False)[1][1]


class _Rope:
    """transformers' own rotary positions, without building a model for them."""

    def __init__(self, config) -> None:
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

        self.config = config
        self.spatial_merge_size = config.vision_config.spatial_merge_size
        for name in ("get_rope_index", "get_llm_pos_ids_for_vision", "get_chunked_index"):
            setattr(self, name, getattr(Thinker, name).__get__(self))

    def positions(self, ids: torch.Tensor, features: dict[str, torch.Tensor]) -> torch.Tensor:
        """(3, T) int64 for ids (1, T). Without video every position is a whole number."""
        mask = features.get("feature_attention_mask")
        found, _ = self.get_rope_index(
            ids,
            features.get("image_grid_thw"),
            None,
            torch.ones_like(ids),
            False,
            None if mask is None else mask.sum(-1),
            None,
        )
        return found[:, 0].long()


def _template_content(parts: tuple[Part, ...]) -> str | list[dict[str, str]]:
    """A string where there is only text: not every published template takes a list in a system turn."""
    if all(part.type == "text" for part in parts):
        return "".join(part.text or "" for part in parts)
    return [{"type": "text", "text": p.text or ""} if p.type == "text" else {"type": p.type} for p in parts]


def _eos_ids(path, tokenizer, generation_config) -> set[int]:
    if (path / "generation_config.json").is_file():
        ids = generation_config.from_pretrained(path).eos_token_id
        if ids is not None:
            return {ids} if isinstance(ids, int) else set(ids)
    return {tokenizer.eos_token_id}


def _bytes(prompt: Prompt) -> int:
    tensors = sum(t.numel() * t.element_size() for t in prompt.features.values())
    pictures = sum(3 * image.width * image.height for image in prompt.media.get("image", ()))
    return tensors + pictures + sum(clip.nbytes for clip, _ in prompt.media.get("audio", ())) + 64 * len(prompt.ids)
