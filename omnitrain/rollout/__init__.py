"""Rollout engines: the protocol, one file per engine, and the choice between them. Imports no torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnitrain.recipe.schema import Recipe
    from omnitrain.rollout.engine import RolloutEngine


def build_engine(recipe: "Recipe", *, ranks: Any, policy: Any, processing: Any, dummy_weights: bool = False) -> "RolloutEngine":
    """The engine of `recipe.rollout` on this rank; call it on all ranks at once.

    Args:
        ranks: has `tensor_parallel`.
        policy: samples by itself under engine = "trainer", else unused.
        processing: has `eos_ids`, which end a response and are kept in it, and `decode(ids)` for Sample.text.
        dummy_weights: do not read the checkpoint; the first load_weights must be full.
    """
    rollout = recipe.rollout
    if rollout.engine == "trainer":
        from omnitrain.rollout.trainer import TrainerEngine

        return TrainerEngine(
            policy, max_concurrent=rollout.max_concurrent, eos_ids=processing.eos_ids, decode=processing.decode
        )
    from omnitrain.device import engine_kernels
    from omnitrain.rollout.queue import engine_group
    from omnitrain.rollout.vllm_omni import VllmOmniEngine

    longest = max(rollout.max_new_tokens, recipe.validate_.max_new_tokens or 0)
    with engine_kernels():
        return VllmOmniEngine(
            recipe.model.path,
            place=engine_group(ranks.tensor_parallel),
            dtype=recipe.model.dtype,
            seed=recipe.seed,
            max_model_len=recipe.data.max_prompt_tokens + longest,
            max_concurrent=rollout.max_concurrent,
            max_batched_tokens=rollout.max_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            sleep=rollout.sleep,
            prefix_caching=rollout.prefix_caching,
            enforce_eager=rollout.enforce_eager,
            eos_ids=processing.eos_ids,
            decode=processing.decode,
            dummy_weights=dummy_weights,
        )
