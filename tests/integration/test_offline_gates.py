"""The gates of offline runs, each against the fault it is there for. In this process, on one rank and the tiny model."""

import dataclasses
import json

import pytest
import torch

from omnitrain.data.schema import system_hash, write_rows
from omnitrain.errors import GateRefused
from omnitrain.recipe.gates import OFFLINE
from omnitrain.train.metrics import comparable
from omnitrain.train.offline_gates import OfflineGates
from omnitrain.train.state import TrainState
from tests.integration.conftest import one_rank_run
from tests.unit.models.conftest import clip, picture, sound

pytestmark = pytest.mark.timeout(120)
RECIPE = """
name = "offline-gates"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8, targets = "attention+experts" }} }}
algorithm = {{ kind = "dpo" }}
train = {{ prompts_per_step = 3, max_tokens_per_device = 1024, learning_rate = 5e-3, max_steps = 1 }}
[data]
train = "{train}"
max_prompt_tokens = 512
use_audio_in_video = true
video = {{ min_pixels = 3136, max_pixels = 4096 }}
"""
KINDS = ("audio", "image", "text", "video with sound", "video without sound")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model):
    """A recipe on ten pairs: two of each kind; half of the videos do not say whether they have a sound track."""
    folder = tmp_path_factory.mktemp("offline-gates")
    rows = []
    for index in range(10):
        kind = KINDS[index % 5]
        parts = []
        if kind in ("audio", "image"):
            parts.append(sound(0.4) if kind == "audio" else picture())
        elif kind != "text":
            parts.append(clip(8, 8, hertz=500 if kind == KINDS[3] else None, seed=index))
        content = [{"type": part.type, "data": part.data} for part in parts]
        content.append({"type": "text", "text": f"Which one? Question {index}."})
        told = {"sound_track": kind == "video with sound"} if index < 5 and "video" in kind else {}
        message = {"role": "user", "content": content}
        row = {"id": f"pair-{index}", "messages": [message], "source": "pairs", "answer": "red", "meta": told}
        rows.append(row | {"chosen": "It is red." + " Yes." * (index % 3), "rejected": "No idea!"})
    write_rows(folder / "train.parquet", rows, system_hash=system_hash(None))
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(model=tiny_model, train=folder / "train.parquet"))
    return path


@dataclasses.dataclass
class Parts:
    """A run whose gates have passed."""

    context: object
    loop: object

    @property
    def policy(self):
        return self.context.policy

    def gates(self, **recipe):
        changed = self.context.recipe.model_copy(update=recipe)
        return OfflineGates(dataclasses.replace(self.context, recipe=changed), self.loop)

    def refusal(self, gate: str) -> str:
        """Run the gates, which must be stopped by this one; returns its words."""
        with pytest.raises(GateRefused) as caught:
            self.gates().run()
        assert caught.value.exit_code == 3
        assert str(caught.value).startswith(f"{gate} ({OFFLINE[gate].title}): ")
        assert all(f"\n  - {cause}" in str(caught.value) for cause in OFFLINE[gate].causes)
        last = verdicts(self.context.run)[-1]
        assert last["gate"] == gate and not last["ok"]
        return last["detail"]


def verdicts(run) -> list[dict]:
    return json.loads((run.path / "gates.json").read_text())


def offline_parts(recipe, *sets: str, name: str):
    with pytest.MonkeyPatch.context() as patch, one_rank_run(patch, recipe, *sets, name=name) as run:
        yield Parts(run.context, run._offline(TrainState(run.context)))


@pytest.fixture(scope="module")
def live(recipe):
    yield from offline_parts(recipe, name="live")


@pytest.fixture(scope="module")
def stored(recipe):
    yield from offline_parts(recipe, "algorithm.reference=precomputed", name="stored")


def test_offline_gates_look_at_every_kind_and_pass_with_numbers(live, stored):
    for parts in (live, stored):
        found = {verdict["gate"]: verdict for verdict in verdicts(parts.context.run)}
        assert list(found) == ["g3", "g5", "g10"] and all(v["ok"] and not v["skipped"] for v in found.values())
        assert "12 adapters trained (2 down_proj, 2 gate_up_proj, 2 k_proj," in found["g3"]["detail"]
        kinds = parts.gates().probed.kinds
        assert sorted(kinds.values()) == sorted(2 * KINDS) and kinds[8] == KINDS[3]
    assert "max |log ratio| 0, largest |D| of a pair 0, allowed 1e-06" in verdicts(live.context.run)[1]["detail"]
    assert "allowed 1e-05" in verdicts(stored.context.run)[1]["detail"]


# -- g3


def test_g3_w1_w2_fires_when_a_target_carries_no_adapter(live, monkeypatch):
    kept = [(n, p) for n, p in live.policy.trainable() if "v_proj" not in n]
    monkeypatch.setattr(live.policy, "trainable", lambda: kept)
    assert live.refusal("g3") == "v_proj: 0 adapters are trained; at least 1 of each target is needed"


def test_g3_w2_fires_when_an_adapter_is_bound_and_not_trained(live, monkeypatch):
    kept = [(n, p) for n, p in live.policy.trainable() if "layers.1.self_attn.v_proj.lora_B" not in n]
    monkeypatch.setattr(live.policy, "trainable", lambda: kept)
    assert "12 adapters are bound, and 23 of their 24 factors are trained" in live.refusal("g3")


@pytest.mark.parametrize("target", ["q_proj", "down_proj"])
def test_g3_w1_fires_when_the_forward_pass_goes_around_an_adapter(live, monkeypatch, target):
    for name, child in live.policy.module.named_modules():
        if "default" in getattr(child, "lora_A", ()) and ".layers.1." in name:
            if target in name or getattr(child, "parameter_name", "") == target:
                monkeypatch.setitem(child.scaling, "default", 0.0)
    detail = live.refusal("g3")
    assert "1 of 12 adapters have no gradient that is finite and above 0: largest entry 0 of" in detail
    assert f"layers.1.{'mlp.experts' if target == 'down_proj' else 'self_attn'}.{target}" in detail


def test_g3_fires_when_a_gradient_is_not_a_number(live, monkeypatch):
    real = live.policy.logprobs

    def logprobs(*args, **options):
        logp, entropies = real(*args, **options)
        return logp * float("nan"), entropies

    monkeypatch.setattr(live.policy, "logprobs", logprobs)
    assert "12 of 12 adapters have no gradient that is finite and above 0: largest entry nan" in live.refusal("g3")


# -- g5


def test_g5_fires_when_the_policy_starts_elsewhere_than_the_reference(live):
    factor = dict(live.policy.trainable())["model.layers.1.self_attn.o_proj.lora_B.weight"]
    with torch.no_grad():
        factor.add_(0.01)
    try:
        detail = live.refusal("g5")
    finally:
        with torch.no_grad():
            factor.zero_()
    assert "before step 1 (D per token); at most 1e-06 is allowed" in detail
    assert all(float(detail.split(word)[1].split()[0].strip(",")) > 1e-6 for word in ("ratio| ", "a pair "))


def test_g5_fires_on_dropout(live, monkeypatch):
    for layer in live.policy._thinker.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.2)
    live.refusal("g5")


def test_g5_fires_when_the_loss_exchanges_chosen_and_rejected_of_the_reference(live, monkeypatch):
    """The log ratios of the tokens stay 0; the pair's D does not."""
    real = live.loop.objective.pairs

    def pairs(logp, batch):
        whole = torch.stack([part.sum() for part in batch.reference.split(batch.lengths.tolist())])
        sums = whole.view(-1, 2).flip(1).reshape(-1)
        return real(logp, dataclasses.replace(batch, reference=None, reference_sums=sums))

    monkeypatch.setattr(live.loop.objective, "pairs", pairs)
    assert live.refusal("g5").startswith("max |log ratio| 0, largest |D| of a pair ")


@pytest.mark.parametrize("change", [lambda pair: pair[::-1], lambda pair: [pair[0] + 0.01, pair[1] + 0.01]])
def test_g5_fires_when_stored_log_probs_are_of_other_responses_or_weights(stored, monkeypatch, change):
    _, table = stored.loop.reference._tables[0]
    monkeypatch.setitem(table, "pair-3", change(table["pair-3"]))
    assert "at most 1e-05 is allowed" in stored.refusal("g5")


# -- g10


def test_g10_p4_fires_when_adapters_are_left_out(live, monkeypatch):
    from omnitrain.train import checkpoint

    real = checkpoint.trainable_state
    monkeypatch.setattr(
        checkpoint, "trainable_state", lambda module: {n: t for n, t in real(module).items() if "lora_B" not in n}
    )
    assert "a checkpoint holds 12 weights, 24 are trained" in live.refusal("g10")


def test_the_gates_pass_again_after_every_mutation_above(live, stored):
    for parts in (live, stored):
        assert [(verdict.ok, verdict.skipped) for verdict in parts.gates().run()] == 3 * [(True, False)]


# -- whole runs; each ends this process's group of ranks, so that nothing above can come after them


def test_skipping_the_gates_of_an_offline_run_changes_no_metric(recipe, one_rank):
    logged = []
    for name, skip in (("gated", "[]"), ("free", '["g3","g5","g10"]')):
        with one_rank(recipe, f"gates.skip={skip}", "train.max_steps=3", name=name) as run:
            run.train()
            logged.append([comparable(json.loads(line)) for line in run.run.metrics.read_text().splitlines()])
            assert all(verdict["skipped"] == (name == "free") for verdict in verdicts(run.run))
    assert logged[0] == logged[1] and len(logged[0]) == 3


def test_g5_is_skipped_where_the_policy_was_moved_on_purpose_and_runs_from_a_starting_adapter(recipe, one_rank, capfd):
    trained = recipe.parent / "trained"
    with one_rank(recipe, name="trained") as run:
        run.train()
    with one_rank(recipe, "train.max_steps=2", name="trained") as run:
        run.train()
    assert verdicts(run.run)[1]["detail"] == "step 1 has moved the policy from its reference"
    assert "gate g5  skip    step 1 has moved the policy from its reference" in capfd.readouterr().out
    with one_rank(recipe, f'model.init_from="{trained}"', name="moved") as run:
        run.train()
    assert (
        verdicts(run.run)[1]["skipped"] and "model.init_from starts the policy else" in verdicts(run.run)[1]["detail"]
    )
    with one_rank(recipe, f'model.adapter="{trained}"', name="adapter") as run:
        run.train()
    assert verdicts(run.run)[1]["detail"] == "max |log ratio| 0, largest |D| of a pair 0, allowed 1e-06"


@pytest.mark.parametrize("lora", [True, False])
def test_sft_has_the_gates_that_compare_something_there(recipe, one_rank, lora):
    unsets = () if lora else ["model.lora"]
    with one_rank(recipe, "algorithm.kind=sft", name=f"sft-{lora}", unsets=unsets) as run:
        run.train()
    found = verdicts(run.run)
    assert [v["gate"] for v in found] == ["g3", "g10"] and all(v["ok"] for v in found)
    assert found[0]["detail"].endswith("each has a gradient")
    assert found[0]["detail"].startswith(
        "12 adapters trained" if lora else f"{len(run.context.policy.trainable())} tensors"
    )


def test_g5_of_a_dpo_run_in_bfloat16_passes(recipe, one_rank):
    with one_rank(recipe, "model.dtype=bfloat16", name="bfloat16") as run:
        run.train()
    assert verdicts(run.run)[1]["detail"].startswith("max |log ratio| 0, largest |D| of a pair 0, allowed ")
