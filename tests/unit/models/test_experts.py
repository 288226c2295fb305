"""LoRA on the fused experts: against peft's own forward, and what the engine is given."""

import pytest
import torch
from safetensors.torch import load_file

from omnitrain import device as devices
from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni import experts, lora
from omnitrain.models.qwen3_omni.spec import EXPERTS, LORA_TARGETS, Lora

BOTH = "attention+experts"


@pytest.fixture
def adapted(make_policy):
    """With adapters on attention and experts whose B matrices are not zero. Rank 3 is no multiple of a kernel's rows."""
    return make_policy(Lora(rank=3, alpha=6, targets=BOTH), noise=0.1)


def peft_forward(policy) -> None:
    """Run the experts as peft does, with W + scale B A in the place of W."""
    for module in policy.module.modules():
        if experts.is_wrapper(module):
            module.__dict__.pop("forward", None)


def answer(policy, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and the gradients of a weighted sum of them."""
    policy.module.zero_grad()
    logp, _ = policy.logprobs(batch, temperature=0.9)
    (logp * torch.linspace(-1, 2, logp.numel())).sum().backward()
    return logp.detach(), {name: p.grad.clone() for name, p in policy.trainable()}


def assert_close(got, expected):
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=0)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.norm() > 0, name
        assert (got[1][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("targets", [BOTH, ["gate_up_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_gradients_equal_pefts_own(make_policy, batch, targets, checkpointing):
    policy = make_policy(Lora(rank=3, alpha=6, targets=targets), checkpointing=checkpointing, noise=0.1)
    got = answer(policy, batch)
    peft_forward(policy)
    assert_close(got, answer(policy, batch))


def test_grouped_products_equal_the_loop_over_experts(adapted, batch, monkeypatch):
    expected = answer(adapted, batch)
    monkeypatch.setattr(devices, "experts_implementation", lambda device: "grouped_mm")
    assert_close(answer(adapted, batch), expected)


def test_an_adapter_without_change_leaves_the_model_as_it_is(make_policy, batch):
    policy = make_policy(Lora(rank=4, targets=BOTH))
    with torch.no_grad():
        torch.testing.assert_close(policy.logprobs(batch)[0], make_policy().logprobs(batch)[0], atol=1e-5, rtol=0)


def test_the_reference_is_the_model_without_adapter_bit_for_bit(adapted, make_policy, batch):
    with torch.no_grad():
        before, base = adapted.logprobs(batch)[0], make_policy().logprobs(batch)[0]
        with adapted.reference():
            assert torch.equal(adapted.logprobs(batch)[0], base)
        assert torch.equal(adapted.logprobs(batch)[0], before) and (before - base).abs().max() > 1e-2


def test_no_copy_of_the_experts_is_kept_for_the_backward_pass_where_peft_keeps_one(adapted, batch):
    """Why the forward is not peft's. When its half of this test fails, experts.py may be gone."""
    weights = [adapted._params[f"model.layers.{i}.mlp.experts.gate_up_proj"] for i in (0, 1)]
    own = {weight.untyped_storage().data_ptr() for weight in weights}

    def kept() -> int:
        """Tensors shaped like a layer's experts, but not them, that autograd holds on to."""
        found = set()

        def keep(tensor):
            base = tensor if tensor._base is None else tensor._base
            if base.shape == weights[0].shape and base.untyped_storage().data_ptr() not in own:
                found.add(base.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logp, _ = adapted.logprobs(batch)
        logp.sum().backward()
        return len(found)

    assert kept() == 0
    peft_forward(adapted)
    assert kept() == 2


@pytest.mark.parametrize(
    "targets, count", [(BOTH, 12), (["q_proj", "down_proj"], 4), (["gate_up_proj", "down_proj"], 4)], ids=str
)
def test_w1_w2_every_target_binds_once_per_layer_and_all_of_it_is_streamed(make_policy, targets, count):
    policy = make_policy(Lora(rank=2, targets=targets))
    assert policy.lora_count == count and len(policy.trainable()) == 2 * count
    streamed = {name for name, _ in policy.stream_weights()}
    assert streamed == policy.expected_names()
    parts = {name.rsplit(".", 2)[-2] for name in streamed}
    attention = set() if targets == ["gate_up_proj", "down_proj"] else {"q_proj", "k_proj", "v_proj"}
    attention |= {"o_proj"} if targets == BOTH else set()
    assert parts == attention | {"gate_proj", "up_proj", "down_proj"}
    assert sum(".experts." in name for name in streamed) == 2 * 4 * 3


def test_w1_an_unknown_target_is_named_with_those_there_are(make_policy):
    with pytest.raises(ModelError, match="gate_proj matches no linear module.*down_proj, gate_up_proj, k_proj"):
        make_policy(Lora(targets=["q_proj", "gate_proj"]))


def test_w4_the_stream_is_each_experts_weight_plus_its_own_scaled_ba(adapted, tiny_model):
    base, streamed, trained = load_file(tiny_model / "model.safetensors"), dict(adapted.stream_weights()), dict(adapted.trainable())
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        for e in range(4):
            for part, size in (("gate_up_proj", 128), ("down_proj", 128)):
                a = trained[f"{prefix}.{part}.lora_A.weight"].view(4, 3, -1)[e]
                b = trained[f"{prefix}.{part}.lora_B.weight"].view(size, 3, 4)[:, :, e]
                parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                for name, delta in zip(parts, (2.0 * b @ a).chunk(len(parts))):
                    stored = f"thinker.{prefix}.{e}.{name}.weight"
                    assert delta.norm() > 0
                    torch.testing.assert_close(streamed[stored], base[stored] + delta, atol=1e-6, rtol=0)


def test_a_streamed_merge_behaves_as_the_adapter(adapted, make_policy, batch):
    copy = make_policy()
    with torch.no_grad():
        for name in adapted._adapters:
            copy._params[name].copy_(adapted._for_engine(name))
        torch.testing.assert_close(copy.logprobs(batch)[0], adapted.logprobs(batch)[0], atol=3e-5, rtol=0)


@pytest.mark.parametrize("noise, low, high", [(1e-5, 0.0, 0.2), (0.3, 0.9, 1.1)])
def test_delta_kept_counts_experts(make_policy, noise, low, high):
    policy = make_policy(Lora(rank=4, targets=list(EXPERTS)), dtype="bfloat16")
    with torch.no_grad():
        for name, p in policy.trainable():
            if "lora_B" in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)), alpha=noise)
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in policy.stream_weights())
    assert low <= policy.delta_kept <= high


@pytest.mark.parametrize("targets", [LORA_TARGETS[BOTH], ["down_proj"], ["gate_up_proj", "q_proj"]], ids=str)
def test_a_factors_name_in_an_adapters_file_has_one_plain_name(make_policy, targets):
    names = [name for name, _ in make_policy(Lora(rank=2, targets=targets)).trainable()]
    stored = [lora.peft_name(name, targets) for name in names]
    assert len(set(stored)) == len(names)
    assert [lora.plain_name(name.replace(".thinker.", ".", 1), targets) for name in stored] == names
