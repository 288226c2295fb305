"""The recipe's [rollout] table: one class per engine. Imports no torch."""

from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from omnitrain.recipe.base import Section


class _Rollout(Section):
    group_size: int = Field(16, ge=1)
    """Responses per prompt."""

    max_new_tokens: int = Field(1024, ge=1)
    """Longest response, in tokens."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by it too."""

    max_concurrent: int = Field(256, ge=1)
    """Most responses an engine works on at once."""


class VllmOmniRollout(_Rollout):
    """vLLM-Omni inside each training process."""

    engine: Literal["vllm_omni"] = "vllm_omni"
    """The rollout engine."""

    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one engine; must divide the number of ranks."""

    gpu_memory_utilization: float = Field(0.7, gt=0, lt=1)
    """Share of the accelerator's memory that the engine may fill while it is awake."""

    sleep: Literal["auto", "off", "kv", "weights"] = "auto"
    """What the engine gives back between rollouts: nothing, its KV cache, or its weights as well."""

    prefix_caching: bool = True
    """Share the KV cache of equal prompt beginnings."""

    enforce_eager: bool = False
    """Do not capture device graphs."""

    max_batched_tokens: int = Field(8192, ge=64)
    """Most tokens in one engine step."""


class TrainerRollout(_Rollout):
    """The trainer's own module samples, token by token: slow, and the oracle for every other engine."""

    engine: Literal["trainer"]
    """The rollout engine."""


def _engine(value: Any) -> str:
    engine = value.get("engine", "vllm_omni") if isinstance(value, dict) else getattr(value, "engine", "?")
    return engine if isinstance(engine, str) else "?"


Rollout = Annotated[
    Union[Annotated[VllmOmniRollout, Tag("vllm_omni")], Annotated[TrainerRollout, Tag("trainer")]],
    Discriminator(_engine),
]
