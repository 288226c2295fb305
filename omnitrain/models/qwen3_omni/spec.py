"""Qwen3-Omni's section of the recipe and its sizes. Imports no torch."""

from typing import Literal

from pydantic import Field

from omnitrain.recipe.base import Section

# Named sets of LoRA targets. Only the Thinker's text decoder is ever matched.
LORA_TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


class Lora(Section):
    """Low-rank adapters on the Thinker's text decoder."""

    rank: int = Field(32, ge=1)
    """Rank r of the adapter matrices."""

    alpha: float = Field(64, gt=0)
    """Scaling: the adapter is multiplied by alpha / rank."""

    targets: list[str] | str = Field("attention")
    """Module names, or the name of a set: "attention" is q_proj, k_proj, v_proj, o_proj."""

    def module_names(self) -> list[str]:
        """The targets as a list of module names."""
        return list(LORA_TARGETS.get(self.targets, [self.targets])) if isinstance(self.targets, str) else list(self.targets)


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
