"""Log-probs of packed rows, their gradients, the reference, and the weights for the engine."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni import head
from omnitrain.models.qwen3_omni.spec import Lora
from tests.unit.models.conftest import ANSWERS, disturb


def plain_logits(model, prompt, response):
    """transformers alone: one sequence with an attention mask, positions of its own."""
    ids = torch.tensor([prompt.ids + response])
    seconds = torch.tensor(prompt.options.get("second_per_grid_ts", []))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "video_second_per_grid": seconds}
    return model(**given, **prompt.features).logits[0].float()


@pytest.fixture(scope="module")
def thinker(tiny_model):
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(tiny_model, dtype=torch.float32).eval()


@torch.no_grad()
def test_packed_logprobs_equal_transformers_one_by_one_for_every_modality(make_policy, batch, thinker):
    logp, entropy = make_policy().logprobs(batch, temperature=0.7, entropy=True)
    lengths = [len(a) for a in ANSWERS]
    for (prompt, response), got, got_entropy in zip(batch, logp.split(lengths), entropy.split(lengths), strict=True):
        n = len(prompt.ids)
        logits = plain_logits(thinker, prompt, response)[n - 1 : -1] / 0.7
        expected = logits.log_softmax(-1)
        torch.testing.assert_close(got, expected[torch.arange(len(response)), response], atol=5e-6, rtol=0)
        torch.testing.assert_close(got_entropy, -(expected.exp() * expected).sum(-1), atol=2e-5, rtol=0)


@torch.no_grad()
def test_what_is_packed_beside_a_sequence_does_not_change_it(lora_policy, batch):
    whole = lora_policy.logprobs(batch)[0].split([len(a) for a in ANSWERS])
    for pair, expected in zip(batch, whole, strict=True):
        torch.testing.assert_close(lora_policy.logprobs([pair])[0], expected, atol=5e-6, rtol=0)


@torch.no_grad()
def test_a_sampled_media_token_is_an_ordinary_token(lora_policy, batch):
    config = lora_policy._thinker.config
    said = [5, config.image_token_id, config.audio_token_id, config.vision_start_token_id, 7]
    logp, _ = lora_policy.logprobs([(prompt, said) for prompt, _ in batch])
    assert logp.shape == (len(said) * len(batch),) and logp.isfinite().all()
    # The tokens before the media tokens see nothing of them.
    first, _ = lora_policy.logprobs([(prompt, said[:2]) for prompt, _ in batch])
    torch.testing.assert_close(logp.view(len(batch), -1)[:, :2], first.view(len(batch), -1), atol=5e-6, rtol=0)


@torch.no_grad()
def test_next_logits_are_those_after_the_last_token(make_policy, batch, thinker):
    logits = make_policy().next_logits(batch)
    assert logits.dtype == torch.float32 and logits.shape[0] == len(batch)
    for got, (prompt, response) in zip(logits, batch, strict=True):
        torch.testing.assert_close(got, plain_logits(thinker, prompt, response)[-1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("lora", [Lora(rank=4), None], ids=["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_a_full_softmax(make_policy, batch, lora, checkpointing, monkeypatch):
    policy = make_policy(lora, checkpointing=checkpointing, noise=0.02)
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(head, "_LEAST_ROWS", 3)  # several chunks
    weight = torch.linspace(-1, 2, sum(map(len, ANSWERS)))

    def gradients(logp):
        (logp * weight).sum().backward()
        found = {name: p.grad.clone() for name, p in policy.trainable() if p.grad is not None}
        policy.module.zero_grad()
        return found

    got = gradients(policy.logprobs(batch, temperature=0.8)[0])
    rows = []
    for prompt, response in batch:
        logits = plain_logits(policy.module, prompt, response)[len(prompt.ids) - 1 : -1] / 0.8
        rows.append(logits.log_softmax(-1)[torch.arange(len(response)), response])
    expected = gradients(torch.cat(rows))
    assert got.keys() == expected.keys() == dict(policy.trainable()).keys()
    for name in expected:
        assert (got[name] - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-7, name


def test_an_empty_batch_still_has_a_backward_pass_with_zero_gradients(lora_policy):
    logp, entropy = lora_policy.logprobs([], entropy=True)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for _, p in lora_policy.trainable())


def test_q3_every_modality_gives_a_gradient(lora_policy, batch):
    for pair in batch:
        lora_policy.module.zero_grad()
        logp, _ = lora_policy.logprobs([pair])
        assert logp.isfinite().all()
        logp.sum().backward()
        assert all(p.grad.norm() > 0 for _, p in lora_policy.trainable())


def test_the_reference_is_the_model_without_adapter_bit_for_bit_and_training_goes_on_after_it(
    lora_policy, make_policy, batch
):
    with torch.no_grad():
        base, before = make_policy().logprobs(batch)[0], lora_policy.logprobs(batch)[0]
        with lora_policy.reference():
            assert torch.equal(lora_policy.logprobs(batch)[0], base)
        assert torch.equal(lora_policy.logprobs(batch)[0], before) and not torch.equal(base, before)
    lora_policy.logprobs(batch)[0].sum().backward()
    assert all(p.grad is not None for _, p in lora_policy.trainable()) and len(lora_policy.trainable()) == 16


def test_full_training_has_no_reference(make_policy):
    with pytest.raises(ModelError, match="model.lora is not set"), make_policy().reference():
        pass


def test_w4_the_stream_is_base_plus_scaled_ba_for_trained_projections_and_their_fused_siblings(make_policy, tiny_model):
    policy = make_policy(Lora(rank=4, alpha=12, targets=["q_proj"]), noise=0.1)
    base, streamed, trained = (
        load_file(tiny_model / "model.safetensors"),
        dict(policy.stream_weights()),
        dict(policy.trainable()),
    )
    attention = [f"model.layers.{i}.self_attn." for i in (0, 1)]
    assert set(streamed) == policy.expected_names() == {f"thinker.{a}{x}_proj.weight" for a in attention for x in "qkv"}
    for a in attention:
        delta = 3.0 * (trained[f"{a}q_proj.lora_B.weight"] @ trained[f"{a}q_proj.lora_A.weight"])
        assert delta.norm() > 0
        assert torch.equal(streamed[f"thinker.{a}q_proj.weight"], base[f"thinker.{a}q_proj.weight"] + delta)
        assert torch.equal(streamed[f"thinker.{a}k_proj.weight"], base[f"thinker.{a}k_proj.weight"])


def test_the_full_stream_is_the_published_checkpoint_towers_included(make_policy, tiny_model):
    policy = make_policy(Lora(rank=4))
    streamed, published = dict(policy.stream_weights(full=True)), load_file(tiny_model / "model.safetensors")
    assert set(streamed) == set(published) == policy.expected_names(full=True)
    assert all(torch.equal(streamed[name], published[name]) for name in published)


def test_full_training_streams_all_it_trains_and_no_tower(make_policy):
    names = make_policy().expected_names()
    assert "thinker.model.layers.0.mlp.experts.3.up_proj.weight" in names and "thinker.lm_head.weight" in names
    assert not any("visual" in name or "audio_tower" in name for name in names)


def test_a_streamed_merge_behaves_as_the_adapter(lora_policy, make_policy, batch, thinker):
    merged = {name.removeprefix("thinker."): t for name, t in lora_policy.stream_weights()}
    copy = make_policy()
    with torch.no_grad():
        for name, tensor in merged.items():
            copy._params[name].copy_(tensor)
        torch.testing.assert_close(copy.logprobs(batch)[0], lora_policy.logprobs(batch)[0], atol=2e-5, rtol=0)


def test_the_stream_reads_the_weights_when_it_is_consumed_not_when_it_was_asked_for(lora_policy):
    stream = lora_policy.stream_weights()
    before = dict(lora_policy.stream_weights())
    disturb(lora_policy, 0.1)
    after = dict(stream)
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("noise, low, high", [(1e-5, 0.0, 0.2), (0.3, 0.9, 1.1)])
def test_delta_kept_tells_deltas_that_vanish_in_the_cast(make_policy, noise, low, high):
    policy = make_policy(Lora(rank=4), dtype="bfloat16")
    assert policy.delta_kept == 1.0
    with torch.no_grad():
        for name, p in policy.trainable():
            if "lora_B" in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)), alpha=noise)
    streamed = dict(policy.stream_weights())
    assert {t.dtype for t in streamed.values()} == {torch.bfloat16}
    assert low <= policy.delta_kept <= high
