"""A tiny Qwen3-Omni with random weights, in the published checkpoint layout.

Same classes, names and files as the published model, about 1.4 M parameters (0.84 M in the text decoder),
and a real (small) Qwen tokenizer: the first 2,048 ranks of Qwen's own merges plus the special tokens.
It is what rehearsals, tests and the quickstart run on.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from itertools import islice, pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni.weights import published

RANKS = 2048
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
    "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>",
)  # fmt: skip
# The published template without tools: a message's content is a string or a list of typed parts.
CHAT_TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- part['text'] }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def write_tiny(out: Path, *, seed: int = 0, dtype: str = "float32", shards: int = 1) -> Path:
    """Write the tiny checkpoint to the directory `out` and return it.

    The same seed gives the same bytes. `shards` > 1 splits the weights over several files with an
    index, as the published checkpoint does. Raises ModelError if Qwen's ranks are not installed.
    """
    import transformers as tf

    out = Path(out)
    processor = _processor(_tokenizer())
    ids = {s: processor.tokenizer.convert_tokens_to_ids(s) for s in SPECIALS}
    config = _config(ids, len(processor.tokenizer), dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tf.Qwen3OmniMoeThinkerForConditionalGeneration(config.thinker_config)
    _randomise(model, seed)
    weights = {
        name: part.to(getattr(torch, dtype))
        for parameter, tensor in model.state_dict().items()
        for name, part in published(parameter, tensor)
    }

    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    processor.save_pretrained(out)
    tf.GenerationConfig(
        do_sample=True, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"]
    ).save_pretrained(out)
    _save(weights, out, shards)
    return out


def _ranks() -> list[bytes]:
    """The first RANKS byte tokens of Qwen's vocabulary, by rank, from the dashscope wheel."""
    spec = importlib.util.find_spec("dashscope")
    file = Path(spec.origin).parent / "resources" / "qwen.tiktoken" if spec and spec.origin else None
    if file is None or not file.exists():
        raise ModelError(
            "the tiny model's tokenizer is made from Qwen's ranks in the package dashscope, which is not installed "
            "or has no resources/qwen.tiktoken; fix: install dashscope"
        )
    with file.open("rb") as lines:
        return [base64.b64decode(line.split()[0]) for line in islice(lines, RANKS)]


def _tokenizer():
    """Qwen2Tokenizer over the first ranks. Specials are in the vocabulary, so their ids are fixed."""
    from transformers import AddedToken, Qwen2Tokenizer

    ranks = _ranks()
    rank_of = {token: i for i, token in enumerate(ranks)}
    letters = _byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    merges = [tuple(map(spell, _split(token, rank_of))) for token in ranks if len(token) > 1]
    vocab = {spell(token): i for i, token in enumerate(ranks)} | {s: RANKS + i for i, s in enumerate(SPECIALS)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(
            image_token="<|image_pad|>",
            audio_token="<|audio_pad|>",
            video_token="<|video_pad|>",
            vision_bos_token="<|vision_start|>",
            vision_eos_token="<|vision_end|>",
            audio_bos_token="<|audio_start|>",
            audio_eos_token="<|audio_end|>",
        ),  # fmt: skip
    )
    tokenizer.add_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.model_max_length = 4096
    return tokenizer


def _split(token: bytes, rank_of: dict[bytes, int]) -> list[bytes]:
    """The two pieces whose merge makes `token`: apply all merges of a lower rank to its bytes."""
    pieces, limit = [bytes([b]) for b in token], rank_of[token]
    while len(pieces) > 2:
        pairs = [rank_of.get(a + b, limit) for a, b in pairwise(pieces)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def _processor(tokenizer):
    import transformers as tf

    vision = dict(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    )  # fmt: skip
    return tf.Qwen3OmniMoeProcessor(
        image_processor=tf.Qwen2VLImageProcessor(**vision),
        video_processor=tf.Qwen2VLVideoProcessor(**vision),
        feature_extractor=tf.WhisperFeatureExtractor(
            feature_size=32, sampling_rate=16000, hop_length=160, n_fft=400, chunk_length=30, return_attention_mask=True
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def _config(ids: dict[str, int], vocabulary: int, dtype: str):
    """2 layers, 4 experts, width 128. head_dim is 32, the least that vLLM's CPU attention takes."""
    import transformers as tf

    width = 128
    text = dict(
        vocab_size=(vocabulary + 63) // 64 * 64, hidden_size=width, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=65536, tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="default", rope_theta=1e6, mrope_section=[8, 4, 4], mrope_interleaved=True, interleaved=True
        ),
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"], bos_token_id=None,
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=16, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=width, num_position_embeddings=64, in_chans=3, tokens_per_second=2,
        spatial_patch_size=16, deepstack_visual_indexes=[0, 1],
        # vLLM's config class reads these two, transformers' does not write them by itself.
        image_size=128, apply_vit_abs_pos_embed=True,
    )  # fmt: skip
    audio = dict(
        num_mel_bins=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128, d_model=64, n_window=50,
        n_window_infer=800, output_dim=width, downsample_hidden_size=32, max_source_positions=1500,
    )  # fmt: skip
    user = 872  # "user", the same id as in the published vocabulary
    config = tf.Qwen3OmniMoeConfig(
        thinker_config=dict(
            text_config=text, vision_config=vision, audio_config=audio, position_id_per_seconds=13, dtype=dtype,
            audio_token_id=ids["<|audio_pad|>"], image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"], audio_start_token_id=ids["<|audio_start|>"],
            audio_end_token_id=ids["<|audio_end|>"], vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"], user_token_id=user,
        ),
        talker_config=dict(spatial_merge_size=2),
        enable_audio_output=False, dtype=dtype, user_token_id=user,
        im_start_token_id=ids["<|im_start|>"], im_end_token_id=ids["<|im_end|>"], tts_pad_token_id=ids["<tts_pad>"],
        tts_bos_token_id=ids["<tts_text_bos>"], tts_eos_token_id=ids["<tts_text_eod>"],
    )  # fmt: skip
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config


@torch.no_grad()
def _randomise(model, seed: int) -> None:
    """Weights wide enough that the output distribution is not flat and every input matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
        if name == "lm_head.weight":
            p.mul_(2.0)


def _save(weights: dict[str, torch.Tensor], out: Path, shards: int) -> None:
    weights = {name: t.clone().contiguous() for name, t in weights.items()}  # safetensors refuses shared storage
    if shards == 1:
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        save_file({n: weights[n] for n in weights if where[n] == file}, out / file, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
