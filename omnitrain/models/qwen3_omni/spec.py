"""Qwen3-Omni's section of the recipe and its sizes. Imports no torch."""

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from omnitrain.errors import ModelError
from omnitrain.recipe.base import Section
from omnitrain.recipe.sizes import Sizes

# The fused experts' parameters, in the order in which peft wraps them.
EXPERTS = ("gate_up_proj", "down_proj")
# Named sets of LoRA targets. Only the Thinker's text decoder is ever matched.
LORA_TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "attention+experts": ["q_proj", "k_proj", "v_proj", "o_proj", *EXPERTS],
}


class Lora(Section):
    """Low-rank adapters on the Thinker's text decoder."""

    rank: int = Field(32, ge=1)
    """Rank r of the adapter matrices."""

    alpha: float = Field(64, gt=0)
    """Scaling: the adapter is multiplied by alpha / rank."""

    targets: list[str] | str = Field("attention")
    """Module names, or a set's: "attention" is q_proj, k_proj, v_proj, o_proj; "attention+experts" has the fused experts'
    gate_up_proj and down_proj as well."""

    def module_names(self) -> list[str]:
        """The targets as a list of module names, each once."""
        if isinstance(self.targets, str):
            return list(LORA_TARGETS.get(self.targets, [self.targets]))
        return list(dict.fromkeys(self.targets))


class Qwen3OmniModel(Section):
    """Qwen3-Omni: the Thinker is trained, its towers are frozen, the talker is never loaded."""

    family: Literal["qwen3_omni"]
    """The model family."""

    path: str
    """Checkpoint directory in the published layout, or a hub name that is already in the local cache."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the frozen weights and of the computation, in the trainer and in the engine. LoRA weights are float32."""

    lora: Lora | None = None
    """Low-rank adapters. Without this table all parameters of the text decoder are trained."""

    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """The trainer's attention implementation."""

    init_from: str | None = None
    """Run directory whose last checkpoint gives the starting weights (same family, same trained parameters)."""

    adapter: str | None = None
    """Run directory or exported adapter that the trained adapter starts from, and that is the reference."""

    @model_validator(mode="after")
    def _start(self):
        if self.adapter is not None and self.init_from is not None:
            raise ValueError(
                "model.adapter and model.init_from are both set; model.adapter starts from an adapter and makes it the "
                "reference, model.init_from takes trained weights and leaves the reference at model.path: keep one"
            )
        if self.adapter is not None and self.lora is None:
            raise ValueError(
                f'model.adapter = "{self.adapter}" needs a model.lora table of the same rank and targets; a run that '
                "trained all parameters is continued with model.init_from"
            )
        return self


PUBLISHED = ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "Qwen/Qwen3-Omni-30B-A3B-Thinking", "Qwen/Qwen3-Omni-30B-A3B-Captioner")

_PUBLISHED_SIZES = Sizes(
    source="published",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=152064,
    experts=128,
    experts_per_token=8,
    intermediate=768,
    max_positions=65536,
    tied=False,
    towers=1_190_000_000,  # vision about 0.55e9, audio about 0.64e9
)


def sizes(path: str) -> Sizes | None:
    """Sizes of the checkpoint at `path`: from its config.json, or the published ones; None if neither is at hand.

    `path` is a directory, or a hub name (then the local hub cache is looked at, never the network).
    Raises ModelError for a directory that holds no Qwen3-Omni configuration.
    """
    config_file = Path(path) / "config.json"
    if Path(path).is_dir():
        if not config_file.is_file():
            raise ModelError(f"model.path: {path} has no config.json; it is not a checkpoint directory")
    elif path in PUBLISHED:
        return _PUBLISHED_SIZES
    else:
        config_file = _cached_config(path)
    return _read_sizes(config_file) if config_file else None


def _cached_config(name: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    return found[-1] if found else None


def _read_sizes(config_file: Path) -> Sizes:
    try:
        config = json.loads(config_file.read_text())
        architecture = config.get("model_type")
    except (ValueError, AttributeError):
        raise ModelError(f"{config_file} is not a JSON object; the checkpoint is damaged") from None
    if architecture != "qwen3_omni_moe":
        raise ModelError(
            f'model.path: {config_file.parent} is a "{architecture}" checkpoint, and model.family = "qwen3_omni" '
            'needs "qwen3_omni_moe"'
        )
    try:
        thinker = config["thinker_config"]
        text, vision, audio = thinker["text_config"], thinker["vision_config"], thinker["audio_config"]
        return Sizes(
            source=str(config_file),
            layers=text["num_hidden_layers"],
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
            vocab=text["vocab_size"],
            experts=text["num_experts"],
            experts_per_token=text["num_experts_per_tok"],
            intermediate=text["moe_intermediate_size"],
            max_positions=text["max_position_embeddings"],
            tied=bool(text.get("tie_word_embeddings", False)),
            towers=_vision(vision) + _audio(audio),
            pixels_per_token=(vision["patch_size"] * vision.get("spatial_merge_size", 2)) ** 2,
            frames_per_token=vision.get("temporal_patch_size", 2),
        )
    except (KeyError, TypeError) as error:
        raise ModelError(f"{config_file}: not a Qwen3-Omni configuration, {error} is missing or malformed") from None


def _vision(config: dict) -> int:
    """Parameters of the vision tower, biases left out."""
    width, merged = config["hidden_size"], config["hidden_size"] * config.get("spatial_merge_size", 2) ** 2
    block = 4 * width * width + 2 * width * config["intermediate_size"]
    mergers = 1 + len(config.get("deepstack_visual_indexes", ()))
    patch = 3 * config.get("temporal_patch_size", 2) * config["patch_size"] ** 2
    positions = config.get("num_position_embeddings", 0)
    merger = merged * merged + merged * config["out_hidden_size"]
    return config["depth"] * block + mergers * merger + (patch + positions) * width


def _audio(config: dict) -> int:
    """Parameters of the audio tower, biases left out."""
    width, channels = config["d_model"], config["downsample_hidden_size"]
    layer = 4 * width * width + 2 * width * config["encoder_ffn_dim"]
    bins = -(-config["num_mel_bins"] // 8)  # three convolutions of stride 2
    front = 9 * channels * (1 + 2 * channels) + channels * bins * width
    return config["encoder_layers"] * layer + front + width * width + width * config["output_dim"]
