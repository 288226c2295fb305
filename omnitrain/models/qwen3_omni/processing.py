"""Rows to prompts: chat template, media decoding, Qwen3-Omni's processor, rotary positions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal

from omnitrain.data.sample import Message, Part, Prompt, Row
from omnitrain.errors import DataError, ModelError
from omnitrain.models.qwen3_omni.features import Features
from omnitrain.models.qwen3_omni.layout import Layout
from omnitrain.models.qwen3_omni.weights import Checkpoint
from omnitrain.recipe.data import Pixels, Video


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
        image: `data.image`, how large pictures are.
        video: `data.video`, which frames of videos are seen, and how large.
        use_audio_in_video: a video's sound track is ignored (False), heard between its frames (True), or heard after it
            as a sound of its own ("separate"). A video without one is a plain video in all cases.
        cache_bytes: how much the prompts kept for reuse may hold.

    Raises ModelError if the checkpoint has no usable processor.
    """

    def __init__(
        self,
        path: str,
        *,
        system: str | None,
        max_prompt_tokens: int,
        image: Pixels = Pixels(),
        video: Video = Video(),
        use_audio_in_video: bool | Literal["separate"] = False,
        cache_bytes: int = 2**30,
    ) -> None:
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
        self._layout = Layout(self._config)
        self._features = Features(self._processor, image, video, use_audio_in_video)
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
        media = self._features.load(row, [part for message in messages for part in message.content])
        text = self._processor.apply_chat_template(
            [{"role": m.role, "content": _template_content(m.content, media.separate)} for m in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        engine_ids = self.encode_text(text)
        self._check_placeholders(row, engine_ids, media.count)
        features, spans = self._features.compute(media)
        ordered = [next(spans[kind]) for kind in self._layout.order(engine_ids)]
        ids, positions = self._layout.expand(engine_ids, ordered)
        if len(ids) > self._limit:
            raise OverlongPrompt(row, len(ids), self._limit)
        return Prompt(row, ids, engine_ids, media.for_engine(), features, positions, media.options())

    def messages(self, row: Row) -> list[Message]:
        """The row's messages as the model sees them: their system turn is `data.system`, if that is set."""
        if self._system is None:
            return list(row.messages)
        rest = [message for message in row.messages if message.role != "system"]
        own = [Message("system", (Part("text", text=self._system),))] if self._system else []
        return own + rest

    def _check_placeholders(self, row: Row, engine_ids: list[int], count: dict[str, int]) -> None:
        """One placeholder per media item. More means that the row's text spells a media token."""
        config = self._config
        for kind, token, expected in (
            ("image", config.image_token_id, count["image"]),
            ("image or video", config.vision_start_token_id, count["image"] + count["video"]),
            ("audio", config.audio_token_id, count["audio"]),
            ("audio", config.audio_start_token_id, count["audio"]),
            ("video", config.video_token_id, count["video"]),
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


def _template_content(parts: tuple[Part, ...], separate: set[int]) -> str | list[dict[str, str]]:
    """A string where there is only text: not every published template takes a list in a system turn.

    `separate` holds the id() of the video parts whose sound track follows them.
    """
    if all(part.type == "text" for part in parts):
        return "".join(part.text or "" for part in parts)
    content = []
    for part in parts:
        content.append({"type": "text", "text": part.text or ""} if part.type == "text" else {"type": part.type})
        if id(part) in separate:
            content.append({"type": "audio"})
    return content


def _eos_ids(path, tokenizer, generation_config) -> set[int]:
    if (path / "generation_config.json").is_file():
        ids = generation_config.from_pretrained(path).eos_token_id
        if ids is not None:
            return {ids} if isinstance(ids, int) else set(ids)
    return {tokenizer.eos_token_id}


def _bytes(prompt: Prompt) -> int:
    tensors = sum(t.numel() * t.element_size() for t in prompt.features.values())
    pictures = sum(3 * image.width * image.height for image in prompt.media.get("image", ()))
    frames = sum(frames.nbytes for frames, _ in prompt.media.get("video", ()))
    clips = sum(clip.nbytes for clip, _ in prompt.media.get("audio", ()))
    return tensors + pictures + frames + clips + 64 * len(prompt.ids)
