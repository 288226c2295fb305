"""Each gate against the fault it is there for: break it in a real run, the gate refuses; mend it, the gates pass.

One run for the whole file: a tiny model with LoRA under FSDP on one rank, the real engine, scorer and checkpointer.
"""

import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
from contextlib import contextmanager

import numpy
import pytest
import torch

from omnitrain.errors import DataError, GateRefused
from omnitrain.recipe.gates import GATES
from omnitrain.rollout import vllm_compat, vllm_weights
from omnitrain.rollout.engine import State, SyncReport
from omnitrain.train import checkpoint
from omnitrain.train.online_gates import OnlineGates
from omnitrain.train.rollouts import Rollouts

pytestmark = pytest.mark.timeout(300)
ONLINE_TEXT = ("g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10")
MODALITIES = ("text", "image", "audio", "image+audio")
# Longer than a block of the engine's KV cache, so that the prefix cache has something to keep.
SYSTEM = "Answer in one word and do not explain. " * 16
REWARD = """
from pathlib import Path

def score(response, row):
    mode = Path(__file__).with_name("mode").read_text()
    if mode == "raises" or mode == "raises for one" and row["id"] == "mixed-2":
        raise KeyError("no label")
    return {"nan": float("nan"), "none": None, "list": [1.0, 0.0]}.get(mode, 0.5)
"""
RECIPE = """
name = "gates"
seed = 5

[model]
family = "qwen3_omni"
path = "{model}"
dtype = "float32"
lora = {{ rank = 4, alpha = 8 }}

[data]
train = "{train}"
max_prompt_tokens = 640
system = "{system}"

[algorithm]
kind = "gspo"

[rollout]
group_size = 2
max_new_tokens = 8
max_concurrent = 32

[[rewards]]
kind = "python"
function = "gate_rewards:score"

[train]
prompts_per_step = 4
max_tokens_per_device = 1024
learning_rate = 1e-3
max_steps = 1
"""


@dataclasses.dataclass
class Parts:
    """A run whose gates have passed, and the file that says how its reward behaves."""

    context: object
    rollouts: Rollouts
    loop: object
    mode: object

    @property
    def policy(self):
        return self.context.policy

    @property
    def engine(self):
        return self.rollouts.engine

    @property
    def net(self) -> torch.nn.Module:
        """The engine's own module."""
        return vllm_compat.model(self.engine._llm)

    def gates(self, **recipe) -> list:
        """Run all gates from where a run is before its first step: engine awake."""
        if self.engine.state is not State.AWAKE:
            self.engine.wake()
        changed = self.context.recipe.model_copy(update=recipe)
        return OnlineGates(dataclasses.replace(self.context, recipe=changed), self.rollouts, self.loop).run()

    def verdicts(self) -> list[dict]:
        return json.loads((self.context.run.path / "gates.json").read_text())


def write_inputs(folder, model, train) -> tuple:
    """(recipe file, reward mode file)."""
    (folder / "gate_rewards.py").write_text(REWARD)
    mode = folder / "mode"
    mode.write_text("works")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, train=train, system=SYSTEM))
    return recipe, mode


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model, mixed_rows):
    from omnitrain.recipe.loader import load, resolved
    from omnitrain.rundir import RunDir
    from omnitrain.train.setup import Run
    from omnitrain.train.state import TrainState

    folder = tmp_path_factory.mktemp("gates")
    recipe, mode = write_inputs(folder, tiny_model, mixed_rows)
    directory = RunDir(folder / "run")
    directory.prepare(resolved(load([recipe]).recipe))
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(folder))
        with Run(directory) as prepared:
            loop = prepared._online(TrainState(prepared.context))
            parts = Parts(prepared.context, loop.rollouts, loop, mode)
            yield parts
            # After all mutations, each undone.
            assert len(parts.gates()) == len(ONLINE_TEXT)
    directory.unlock()


@pytest.fixture
def parts(run):
    """The run. After the test, with its mutation undone, the gate that refused must pass again."""
    run.mode.write_text("works")
    with pytest.MonkeyPatch.context() as patch:
        yield run, patch
    run.mode.write_text("works")
    gate = run.verdicts()[-1]["gate"]
    assert next(v for v in run.gates(gates=skipping(run, {gate})) if v.gate == gate).ok


def skipping(run: Parts, kept: set[str]):
    """The recipe's gates table with all but these skipped."""
    return run.context.recipe.gates.model_copy(update={"skip": [g for g in ONLINE_TEXT if g not in kept]})


def refusal(run: Parts, gate: str, **recipe) -> str:
    """Run the gates, which must be stopped by this gate and no other; returns its words."""
    if gate in ("g9", "g10"):  # nothing before them looks at rewards or files; it only takes time
        recipe["gates"] = skipping(run, {"g3", "g7", "g9", "g10"})
    with pytest.raises(GateRefused) as caught:
        run.gates(**recipe)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert message.startswith(f"{gate} ({GATES[gate].title}): "), message
    assert all(f"\n  - {cause}" in message for cause in GATES[gate].causes)
    last = run.verdicts()[-1]
    assert last["gate"] == gate and not last["ok"] and all(v["ok"] for v in run.verdicts()[:-1])
    return last["detail"]


@contextmanager
def shifted(*parameters: torch.Tensor, by: float):
    """The tensors with noise of this size in place, then bit for bit as they were."""
    kept = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in parameters:
                local = checkpoint_local(p)
                local.add_(torch.randn(local.shape, generator=generator) * by)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, kept):
                p.copy_(value)


def checkpoint_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


# -- unbroken -----------------------------------------------------------------------------------------------


def test_an_unbroken_run_passes_every_gate_with_its_numbers(run):
    run.gates()
    found = {v["gate"]: v for v in run.verdicts()}
    assert set(found) == set(ONLINE_TEXT) and all(v["ok"] and not v["skipped"] for v in found.values())
    for modality in MODALITIES:
        assert f"{modality}: Pearson 1.0000" in found["g6"]["detail"] and f"4 {modality}" in found["g7"]["detail"]
    assert "8 of 8 greedy answers equal" in found["g2"]["detail"]
    assert "8 adapters merged" in found["g3"]["detail"]


def test_the_gates_leave_weights_optimizer_random_states_and_engine_bit_for_bit(run):
    def everything() -> dict:
        run.engine.wake()
        tensors = {f"policy {n}": checkpoint_local(p).clone() for n, p in run.policy.module.named_parameters()}
        tensors |= {f"engine {n}": p.detach().clone() for n, p in run.net.named_parameters()}
        tensors |= {f"kernel {i}": t for i, t in enumerate(run.engine._watched())}
        run.engine.sleep()
        tensors["torch"], tensors["numpy"] = torch.get_rng_state(), torch.tensor(numpy.random.get_state()[1])
        return tensors

    before, python, position = everything(), random.getstate(), numpy.random.get_state()[2]
    optimizer = run.loop.state.optimizer
    run.gates()
    assert run.engine.state is State.ASLEEP
    after = everything()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert (random.getstate(), numpy.random.get_state()[2]) == (python, position)
    assert not optimizer.state and all(p.grad is None for _, p in run.policy.trainable())
    assert (run.loop.state.step, run.loop.state.updates) == (0, 0)
    assert list(run.context.run.checkpoints.iterdir()) == []


@pytest.mark.parametrize("skipped", ["g6", "g3"])
def test_gates_skip_leaves_out_exactly_that_gate_and_says_so(run, capsys, skipped):
    gates = run.context.recipe.gates.model_copy(update={"skip": [skipped]})
    run.gates(gates=gates)
    assert [v["gate"] for v in run.verdicts() if v["skipped"]] == [skipped]
    assert {v["gate"] for v in run.verdicts()} == set(ONLINE_TEXT)
    assert f"gate {skipped}  skip    skipped by gates.skip" in capsys.readouterr().out


# -- g1 -----------------------------------------------------------------------------------------------------


def test_g1_w3_fires_when_the_engine_says_it_took_weights_that_it_dropped(parts):
    run, patch = parts

    def load_weights(named, *, full=False):
        return SyncReport(pushed={name for name, _ in named})

    patch.setattr(run.engine, "load_weights", load_weights)
    detail = refusal(run, "g1")
    assert "moved the engine's watched weights by 0, which must be above 0" in detail


def test_g1_fires_when_one_layer_of_two_keeps_stale_weights(parts):
    run, patch = parts
    real = run.engine.load_weights

    def load_weights(named, *, full=False):
        named = list(named)
        report = real(((n, t) for n, t in named if ".layers.1." not in n), full=full)
        return dataclasses.replace(report, pushed={n for n, _ in named})

    patch.setattr(run.engine, "load_weights", load_weights)
    detail = refusal(run, "g1")
    assert "after a perturbing sync: Pearson 0." in detail and "at least 0.9999 is needed" in detail


def test_g1_fires_when_a_sync_leaves_prefixes_of_the_old_weights_in_the_cache(parts):
    run, patch = parts
    patch.setattr(vllm_weights, "reset_caches", lambda llm: llm.llm_engine.reset_encoder_cache())
    assert "after a perturbing sync: Pearson 0." in refusal(run, "g1")


# -- g2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight, hit, spared",
    [
        ("thinker.language_model.model.norm.weight", ["text", "image", "audio"], []),
        ("thinker.audio_tower.ln_post.weight", ["audio"], ["text", "image"]),
    ],
    ids=["decoder", "s3-audio-tower"],
)
def test_g2_s1_fires_when_waking_brings_back_other_weights(parts, weight, hit, spared):
    run, patch = parts
    tensor = run.net.get_parameter(weight)
    kept, real = tensor.detach().clone(), run.engine.wake
    run.engine.wake() if run.engine.state is not State.AWAKE else None

    def wake(state=State.AWAKE):
        real(state)
        with torch.no_grad():
            tensor.copy_(kept * torch.linspace(0, 2, len(kept)))

    patch.setattr(run.engine, "wake", wake)
    try:
        detail = refusal(run, "g2")
    finally:
        with torch.no_grad():
            tensor.copy_(kept)
    found, limit = detail.split("mean |dlogp| of ")[1].split(", at most ")
    assert limit == "0.001 is allowed"
    named = {part.split(" is ")[0] for part in found.split(", ")}
    assert named.issuperset(hit) and named.isdisjoint(spared)


# -- g3 -----------------------------------------------------------------------------------------------------


def streamed(run: Parts, change):
    """stream_weights whose (name, tensor) pairs go through `change`, which returns None to drop one."""
    real = run.policy.stream_weights

    def stream_weights(full=False):
        yield from filter(None, (change(name, tensor) for name, tensor in real(full=full)))

    return stream_weights


def test_g3_w1_fires_when_a_projection_is_streamed_under_a_name_the_engine_does_not_know(parts):
    run, patch = parts
    rename = lambda name, tensor: (name.replace("layers.1.self_attn.o_proj", "layers.1.self_attn.out"), tensor)  # noqa: E731
    patch.setattr(run.policy, "stream_weights", streamed(run, rename))
    detail = refusal(run, "g3")
    assert "the engine took 7 of 8 tensors" in detail
    assert "missing: ['thinker.model.layers.1.self_attn.o_proj.weight']" in detail
    assert "streamed but not taken: ['thinker.model.layers.1.self_attn.out.weight']" in detail


def test_g3_w2_fires_when_a_part_of_a_fused_projection_is_missing(parts):
    run, patch = parts
    drop = lambda name, tensor: None if "layers.1.self_attn.k_proj" in name else (name, tensor)  # noqa: E731
    patch.setattr(run.policy, "stream_weights", streamed(run, drop))
    detail = refusal(run, "g3")
    assert "the engine took 5 of 8 tensors" in detail and "layers.1.self_attn.k_proj.weight" in detail


def test_g3_w1_fires_when_no_module_carries_an_adapter(parts):
    run, patch = parts
    patch.setattr(run.policy, "_adapters", {})
    assert "matched 0 modules; at least 1 is needed" in refusal(run, "g3")


# -- g5 -----------------------------------------------------------------------------------------------------


def passes(run: Parts, change):
    """policy.logprobs whose temperature and log-probs go through `change(temperature)` -> (temperature, function)."""
    real = run.policy.logprobs

    def logprobs(batch, temperature=1.0, entropy=False):
        temperature, after = change(temperature)
        logp, entropies = real(batch, temperature, entropy)
        return after(logp), entropies

    return logprobs


def same(logp):
    return logp


def test_g5_k2_fires_when_only_the_update_divides_by_another_temperature(parts):
    run, patch = parts
    change = lambda t: (t * (1.01 if torch.is_grad_enabled() else 1), same)  # noqa: E731
    patch.setattr(run.policy, "logprobs", passes(run, change))
    assert "at most 1e-06 is allowed" in refusal(run, "g5")


def test_g5_fires_when_the_updates_log_probs_are_not_numbers(parts):
    run, patch = parts
    change = lambda t: (t, lambda logp: logp * (float("nan") if torch.is_grad_enabled() else 1))  # noqa: E731
    patch.setattr(run.policy, "logprobs", passes(run, change))
    assert "is inf, at most 1e-06 is allowed" in refusal(run, "g5")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_g5_k2_fires_on_dropout_also_where_the_tolerance_is_measured(parts, dtype):
    """The run stays in float32; as "bfloat16" the gate measures its tolerance, which dropout must not widen."""
    run, patch = parts
    for layer in run.policy._thinker.model.layers:
        patch.setattr(layer.self_attn, "attention_dropout", 0.2)
    model = run.context.recipe.model.model_copy(update={"dtype": dtype})
    tolerance = run.loop.log_ratio_tolerance
    try:
        assert "max |log ratio| of two passes over the same weights is" in refusal(run, "g5", model=model)
    finally:
        run.loop.log_ratio_tolerance = tolerance


# -- g6 -----------------------------------------------------------------------------------------------------


def disagreeing(detail: str) -> set[str]:
    """The modalities that a refusal of g6 names."""
    head, numbers = detail.split(": ", 1)
    assert all(f"{name}: Pearson " in detail for name in MODALITIES) and "of at least 0.9999" in numbers
    return set(head.removesuffix(" disagree").removesuffix(" disagrees").split(", "))


def test_g6_k4_fires_when_the_trainer_divides_by_another_temperature(parts):
    run, patch = parts
    patch.setattr(run.policy, "logprobs", passes(run, lambda t: (t * 1.02, same)))
    assert disagreeing(refusal(run, "g6")) == set(MODALITIES)


def test_g6_fires_when_log_probs_differ_by_a_constant_which_pearson_cannot_see(parts):
    run, patch = parts
    patch.setattr(run.policy, "logprobs", passes(run, lambda t: (t, lambda logp: logp - 0.01)))
    assert "|dlogp| of at most 0.001" in refusal(run, "g6")


def test_g6_k4_fires_when_a_weight_that_no_sync_carries_differs(parts):
    run, _ = parts
    weights = [p for n, p in run.policy.module.named_parameters() if n.endswith("layers.1.mlp.experts.down_proj")]
    assert len(weights) == 1
    with shifted(*weights, by=0.02):
        assert disagreeing(refusal(run, "g6")) == set(MODALITIES)


def test_g6_k5_names_audio_when_the_trainers_audio_mask_is_broken(parts):
    run, patch = parts
    thinker = run.policy._thinker
    real = thinker.get_audio_features

    def get_audio_features(input_features, feature_attention_mask=None, *args, **kwargs):
        # One frame late: what was padding is heard, and the last frame is not.
        return real(input_features.roll(1, -1), feature_attention_mask, *args, **kwargs)

    patch.setattr(thinker, "get_audio_features", get_audio_features)
    assert disagreeing(refusal(run, "g6")) == {"audio", "image+audio"}


def test_g6_q4_names_image_when_positions_of_its_tokens_differ(parts):
    run, patch = parts
    real = run.loop.source.encode

    def encode(index):
        prompt = real(index)
        positions = prompt.positions.clone()
        positions[1] = positions[1].where(positions[0] == positions[2], positions[1] + 1)  # rows of pictures only
        return dataclasses.replace(prompt, positions=positions)

    patch.setattr(run.loop.source, "encode", encode)
    assert disagreeing(refusal(run, "g6")) == {"image", "image+audio"}


# -- g7 -----------------------------------------------------------------------------------------------------


def test_g7_fires_when_the_processor_writes_one_more_token(parts):
    run, patch = parts
    real = run.loop.source.encode
    patch.setattr(
        run.loop.source, "encode", lambda index: dataclasses.replace(p := real(index), ids=[*p.ids, p.ids[-1]])
    )
    length = len(real(0).ids)
    detail = refusal(run, "g7")
    assert f"row mixed-0 (text): the engine saw {length} prompt ids, the processor wrote {length + 1}" in detail
    assert f"first difference at position {length}" in detail


def test_g7_t3_fires_when_expanded_ids_go_to_the_engine(parts):
    run, patch = parts
    real = run.loop.source.encode
    patch.setattr(run.loop.source, "encode", lambda index: dataclasses.replace(p := real(index), engine_ids=p.ids))
    detail = refusal(run, "g7")
    assert "the engine saw" in detail and "(image)" in detail


def test_gates_over_no_row_at_all_do_not_pass(run):
    refused = run.loop.source._refused
    try:
        run.loop.source._refused = set(range(8))
        with pytest.raises(DataError, match="none of 8 rows fits into data.max_prompt_tokens"):
            run.gates()
    finally:
        run.loop.source._refused = refused


# -- g9 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, words",
    [
        ("nan", "8 of 8 canary scores failed, 0 are allowed; score: row mixed-0: returned nan"),
        ("raises", "8 of 8 canary scores failed, 0 are allowed; score: row mixed-0: KeyError: 'no label'"),
        ("raises for one", "1 of 8 canary scores failed, 0 are allowed; score: row mixed-2: KeyError: 'no label'"),
        ("none", "8 of 8 canary scores failed, 0 are allowed; score: row mixed-0: returned None"),
        ("list", "8 of 8 canary scores failed, 0 are allowed; score: row mixed-0: returned a list of 2"),
    ],
)
def test_g9_r2_fires_when_a_reward_gives_no_finite_number(parts, mode, words):
    run, _ = parts
    run.mode.write_text(mode)
    assert words in refusal(run, "g9")


def test_g9_tolerates_what_on_failure_does_but_not_a_reward_that_never_works(parts):
    run, _ = parts
    rewards = [spec.model_copy(update={"on_failure": "skip"}) for spec in run.context.recipe.rewards]
    run.mode.write_text("raises for one")
    passed = run.gates(rewards=rewards, gates=skipping(run, {"g9"}))
    assert "7 of 8 rows" in next(v.detail for v in passed if v.gate == "g9")
    run.mode.write_text("raises")
    assert "8 of 8 canary scores failed" in refusal(run, "g9", rewards=rewards)


# -- g10 ----------------------------------------------------------------------------------------------------


def test_g10_fires_when_a_bit_of_the_file_flips(parts):
    run, patch = parts
    real = checkpoint._write

    def write(state, folder):
        real(state, folder)
        name, tensor = max(state["model"].items(), key=lambda item: item[1].numel())
        file = next(folder.glob("*.distcp"))
        content = bytearray(file.read_bytes())
        at = content.find(checkpoint_local(tensor).numpy().tobytes())
        assert at > 0, name
        content[at + 5] ^= 1
        file.write_bytes(content)

    patch.setattr(checkpoint, "_write", write)
    refusal(run, "g10")


def test_g10_fires_when_a_tensor_comes_back_rounded(parts):
    run, patch = parts
    real = checkpoint._read

    def read(state, folder):
        real(state, folder)
        tensor = next(t for name, t in state["model"].items() if "lora_A" in name)
        tensor.copy_(tensor.bfloat16().float())

    patch.setattr(checkpoint, "_read", read)
    detail = refusal(run, "g10")
    assert "1 of 19 tensors came back changed: ['model/" in detail and "lora_A" in detail


def test_g10_p4_fires_when_adapters_are_left_out(parts):
    run, patch = parts
    real = checkpoint.trainable_state
    patch.setattr(
        checkpoint, "trainable_state", lambda module: {n: t for n, t in real(module).items() if "lora_B" not in n}
    )
    assert "a checkpoint holds 8 weights, 16 are trained" in refusal(run, "g10")


def test_g10_fires_when_the_optimizers_moments_are_left_out(parts):
    run, patch = parts
    patch.setattr(checkpoint, "optimizer_state", lambda module, optimizer: {})
    assert "a checkpoint holds 13 weights, 16 are trained" in refusal(run, "g10")


def test_g10_fires_when_the_disk_is_full(parts):
    run, patch = parts

    def write(state, folder):
        raise OSError(28, "No space left on device")

    patch.setattr(checkpoint, "_write", write)
    assert "no space for checkpoint" in refusal(run, "g10")


# -- through the command line ---------------------------------------------------------------------------------


def test_a_refusal_ends_the_command_with_3_and_a_short_message(tmp_path, tiny_model, mixed_rows):
    recipe, mode = write_inputs(tmp_path, tiny_model, mixed_rows)
    mode.write_text("nan")
    quick = ['--set=rollout.engine="trainer"', '--set=gates.skip=["g1","g2","g5","g6"]']
    done = subprocess.run(
        [sys.executable, "-m", "omnitrain", "train", str(recipe), "--run-dir", str(tmp_path / "run"), *quick],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 3, output[-3000:]
    assert f"g9 ({GATES['g9'].title}): 8 of 8 canary scores failed, 0 are allowed" in done.stderr
    assert "Traceback" not in output and len(done.stderr.splitlines()) < 15, output
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 3
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
