"""Rollout engines: the protocol, one file per engine, and the choice between them. Imports no torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterable

if TYPE_CHECKING:
    from omnitrain.recipe.schema import Recipe
    from omnitrain.rollout.engine import RolloutEngine
    from omnitrain.rollout.queue import EngineGroup


def build_engine(
    recipe: "Recipe",
    *,
    policy: Any,
    place: "EngineGroup",
    eos_ids: Iterable[int],
    decode: Callable[[list[int]], str] | None,
    seed: int | None = None,
    path: str | None = None,
    dummy_weights: bool = False,
) -> "RolloutEngine":
    """The engine of `recipe.rollout` on this rank; call it on all ranks at once.

    `place` comes from `queue.engine_group(recipe.rollout.tensor_parallel)`, `path` replaces model.path, `policy`
    is needed by the trainer engine alone, `eos_ids` end a response and are kept in it, `decode` fills Sample.text.
    """
    rollout = recipe.rollout
    if rollout.engine == "trainer":
        from omnitrain.rollout.trainer import TrainerEngine

        return TrainerEngine(policy, max_concurrent=rollout.max_concurrent, eos_ids=eos_ids, decode=decode)
    from omnitrain.rollout.vllm_omni import VllmOmniEngine

    longest = max(rollout.max_new_tokens, recipe.validate_.max_new_tokens or 0)
    return VllmOmniEngine(
        path or recipe.model.path,
        place=place,
        dtype=recipe.model.dtype,
        seed=recipe.seed if seed is None else seed,
        max_model_len=recipe.data.max_prompt_tokens + longest,
        max_concurrent=rollout.max_concurrent,
        max_batched_tokens=rollout.max_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        sleep=rollout.sleep,
        prefix_caching=rollout.prefix_caching,
        enforce_eager=rollout.enforce_eager,
        eos_ids=eos_ids,
        decode=decode,
        dummy_weights=dummy_weights,
    )
