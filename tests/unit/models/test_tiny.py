"""The tiny checkpoint has the published layout, a real tokenizer, and is the same for the same seed."""

import base64
import json
from pathlib import Path

import pytest
import tiktoken
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor, Qwen3OmniMoeThinkerForConditionalGeneration

from omnitrain.models.qwen3_omni import tiny


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tiny_model, tmp_path):
    tiny.write_tiny(tmp_path / "again", seed=0)
    for file in sorted(p.name for p in tiny_model.iterdir()):
        assert (tmp_path / "again" / file).read_bytes() == (tiny_model / file).read_bytes(), file
    tiny.write_tiny(tmp_path / "other", seed=1)
    name = "thinker.model.layers.0.self_attn.q_proj.weight"
    one, other = (load_file(p / "model.safetensors")[name] for p in (tiny_model, tmp_path / "other"))
    assert not torch.allclose(one, other)


def test_writing_it_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny.write_tiny(tmp_path / "t")
    assert torch.rand(1) == expected


def test_names_are_those_of_the_published_checkpoint(tiny_model):
    names = set(load_file(tiny_model / "model.safetensors"))
    assert all(name.startswith("thinker.") for name in names)
    assert "thinker.model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert "thinker.model.layers.0.mlp.experts.0.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)
    config = json.loads((tiny_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen3OmniMoeForConditionalGeneration"]


@pytest.mark.parametrize(
    "text", ["What is 12+3?\n\n  <answer>A</answer>", "héllo 世界 🙂", "def f(x):\n\treturn x  # ok"]
)
def test_the_tokenizer_agrees_with_tiktoken_on_the_same_ranks(tiny_model, text):
    tokenizer = AutoProcessor.from_pretrained(tiny_model).tokenizer
    import dashscope
    from dashscope.tokenizers.qwen_tokenizer import PAT_STR

    lines = (Path(dashscope.__file__).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()[: tiny.RANKS]
    ranks = {base64.b64decode(line.split()[0]): i for i, line in enumerate(lines)}
    oracle = tiktoken.Encoding("qwen", pat_str=PAT_STR, mergeable_ranks=ranks, special_tokens={})
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_follow_the_ranks_in_the_published_order(tiny_model):
    tokenizer = AutoProcessor.from_pretrained(tiny_model).tokenizer
    assert tokenizer.convert_tokens_to_ids(list(tiny.SPECIALS)) == list(
        range(tiny.RANKS, tiny.RANKS + len(tiny.SPECIALS))
    )
    assert tokenizer.encode("<|im_start|>user") == [tiny.RANKS + 1, tokenizer.encode("user")[0]]


def test_a_sharded_tiny_holds_the_same_weights(tiny_model, tmp_path):
    tiny.write_tiny(tmp_path / "s", shards=3)
    one = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    three = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        tmp_path / "s", dtype=torch.float32
    ).state_dict()
    assert all(torch.equal(one[name], three[name]) for name in one)
