"""Lean loading: what from_pretrained gives, LoRA where it is meant, and a clear error for every broken directory."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni import tiny
from omnitrain.models.qwen3_omni.spec import Lora
from omnitrain.models.qwen3_omni.weights import Checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lean_loading_equals_from_pretrained(tiny_model, make_policy, dtype):
    policy = make_policy(Lora(rank=4), dtype=dtype)
    reference = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(tiny_model, dtype=getattr(torch, dtype))
    loaded = {name: p for name, p in policy._params.items() if "lora_" not in name}
    expected = dict(reference.named_parameters())
    assert loaded.keys() == expected.keys()
    for name, p in loaded.items():
        assert p.dtype == expected[name].dtype and torch.equal(p, expected[name]), name
    buffers = dict(policy._thinker.named_buffers())
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_a_sharded_checkpoint_loads_the_same(tmp_path, make_policy):
    tiny.write_tiny(tmp_path / "s", shards=3)
    one, three = make_policy(), make_policy(path=tmp_path / "s")
    assert all(torch.equal(p, three._params[name]) for name, p in one._params.items())


def test_w1_lora_binds_the_eight_attention_projections_of_two_text_layers_and_nothing_else(make_policy):
    policy = make_policy(Lora(rank=4))
    assert policy.lora_count == 8
    modules = {name.rsplit(".lora_", 1)[0] for name, _ in policy.trainable()}
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert modules == {f"model.layers.{i}.self_attn.{leaf}" for i in (0, 1) for leaf in leaves}
    assert all(p.dtype == torch.float32 for _, p in policy.trainable())


def test_lora_weights_stay_float32_on_a_bfloat16_base(make_policy):
    policy = make_policy(Lora(rank=4), dtype="bfloat16")
    assert {p.dtype for _, p in policy.trainable()} == {torch.float32}
    assert {p.dtype for p in policy._params.values() if not p.requires_grad} == {torch.bfloat16}


def test_lora_starts_as_the_identity_and_from_the_seed(make_policy, batch):
    base, one, again, other = make_policy(), *(make_policy(Lora(rank=4), seed=s) for s in (1, 1, 2))
    assert torch.equal(base.logprobs(batch)[0], one.logprobs(batch)[0])
    first, second, third = (dict(p.trainable()) for p in (one, again, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(first[name], third[name])
    bound = first[name].shape[1] ** -0.5  # kaiming_uniform(a=sqrt(5)), as peft starts it
    assert 0.9 * bound < first[name].abs().max() <= bound


def test_full_training_trains_the_text_decoder_and_freezes_the_towers(make_policy):
    policy = make_policy()
    trained = {name for name, _ in policy.trainable()}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= trained
    assert "model.layers.1.mlp.experts.gate_up_proj" in trained
    assert not any(name.startswith(("visual", "audio_tower")) for name in trained)
    assert trained == {name for name in policy._params if not name.startswith(("visual", "audio_tower"))}


def test_loading_leaves_the_random_state_alone(make_policy):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make_policy(Lora(rank=4))
    assert torch.rand(1) == expected


@pytest.mark.parametrize("targets", [["query"], ["q_proj", "gate_proj"], "experts", []])
def test_w1_targets_that_match_nothing_are_refused_with_the_names_there_are(make_policy, targets):
    with pytest.raises(ModelError, match="matches no linear module.*k_proj, o_proj, q_proj, v_proj"):
        make_policy(Lora(rank=4, targets=targets))


@pytest.fixture
def broken(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def refused(path, make_policy) -> str:
    with pytest.raises(ModelError) as error:
        make_policy(path=path)
    return str(error.value)


def test_a_path_that_is_neither_directory_nor_cached_model_is_refused(tmp_path, make_policy):
    assert "nowhere/at-all" in (message := refused("nowhere/at-all", make_policy)) and "local hub cache" in message
    assert "no such directory" in refused(tmp_path / "missing", make_policy)
    (tmp_path / "file").touch()
    assert "is a file" in refused(tmp_path / "file", make_policy)


def test_a_directory_without_config_or_of_another_architecture_is_refused(broken, make_policy):
    config = broken / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    assert "'llama'" in refused(broken, make_policy)
    config.write_text("{")
    assert "not a JSON object" in refused(broken, make_policy)
    config.unlink()
    assert "no config.json" in refused(broken, make_policy)


def test_a_directory_without_weights_or_with_damaged_ones_is_refused(broken, make_policy):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors: damaged" in refused(broken, make_policy)
    weights.unlink()
    assert "no weights" in refused(broken, make_policy)


def test_a_missing_shard_is_refused_by_name(tmp_path, make_policy):
    tiny.write_tiny(tmp_path / "s", shards=3)
    (tmp_path / "s" / "model-00002-of-00003.safetensors").unlink()
    message = refused(tmp_path / "s", make_policy)
    assert "1 of 3 weight files are missing: model-00002-of-00003.safetensors" in message


def test_missing_and_misshapen_tensors_are_refused_by_name(broken, make_policy):
    weights = load_file(broken / "model.safetensors")
    expert = "thinker.model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({n: t for n, t in weights.items() if n != expert}, broken / "model.safetensors")
    assert f"1 tensors are missing: {expert}" in refused(broken, make_policy)
    weights[expert] = weights[expert][:, :5].contiguous()
    save_file(weights, broken / "model.safetensors")
    assert f"{expert} is (64, 5), config.json says (64, 128)" in refused(broken, make_policy)


def test_rows_of_fused_experts_are_assembled_from_their_own_files_only(tiny_model):
    checkpoint = Checkpoint(tiny_model)
    shape = torch.Size([4, 128, 128])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = checkpoint.rows(name, shape, 0, 4)
    assert whole.shape == shape and torch.equal(checkpoint.rows(name, shape, 1, 3), whole[1:3])
    assert checkpoint.rows(name, shape, 4, 4).shape == (0, 128, 128)
