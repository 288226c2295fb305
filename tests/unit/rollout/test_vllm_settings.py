"""What vLLM refuses is told in the recipe's words. Needs no vLLM."""

import pytest
from pydantic import BaseModel, model_validator

from omnitrain.errors import UsageError
from omnitrain.rollout.vllm_compat import _settings_in_recipe_terms


class Config(BaseModel):
    max_num_seqs: int

    @model_validator(mode="after")
    def _check(self):
        raise ValueError(f"max_num_batched_tokens (64) must be at least max_num_seqs ({self.max_num_seqs}).")


def test_a_refused_setting_is_a_usage_error_with_the_recipes_names():
    with pytest.raises(UsageError) as caught, _settings_in_recipe_terms():
        Config(max_num_seqs=256)
    text = str(caught.value)
    assert "rollout.max_batched_tokens (64) must be at least rollout.max_concurrent (256)" in text
    assert "\n" not in text and "pydantic" not in text


def test_a_cache_too_small_for_one_sequence_names_the_fields_to_change():
    with pytest.raises(UsageError) as caught, _settings_in_recipe_terms():
        raise ValueError("too little KV cache. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.")
    assert "increasing `rollout.gpu_memory_utilization`" in str(caught.value)
    assert "decreasing `(data.max_prompt_tokens + rollout.max_new_tokens)`" in str(caught.value)


def test_other_errors_pass_unchanged():
    with pytest.raises(RuntimeError, match="device"), _settings_in_recipe_terms():
        raise RuntimeError("device")
