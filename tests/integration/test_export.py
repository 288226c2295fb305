"""What `omnitrain export` writes is what was trained, for PEFT, transformers and vLLM alike."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeForConditionalGeneration as Whole

from omnitrain.cli import main
from omnitrain.errors import ModelError, UsageError
from omnitrain.export import export
from omnitrain.models.qwen3_omni.spec import LORA_TARGETS, Lora
from omnitrain.models.qwen3_omni.tiny import write_tiny
from omnitrain.rundir import RunDir
from omnitrain.train.adapter import load_source
from omnitrain.train.checkpoint import Checkpointer
from tests.integration.workers.trained import make_policy, recipe, train
from tests.unit.models.conftest import ROWS

ROOT = Path(__file__).parents[2]
ADAPTERS = {
    "attention": Lora(rank=3, alpha=6),
    "attention+experts": Lora(rank=3, alpha=6, targets="attention+experts"),
    "one expert tensor": Lora(rank=3, alpha=6, targets=["q_proj", "down_proj"]),
    "full": None,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The tiny model in three shards, with tensors of a talker and a vocoder, which nothing here loads."""
    path = write_tiny(tmp_path_factory.mktemp("base") / "model", shards=3)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = "model-00002-of-00003.safetensors"
    extra = {"talker.model.layers.0.mlp.experts.0.up_proj.weight": torch.randn(4, 4), "code2wav.conv.bias": torch.randn(3)}
    save_file(load_file(path / file) | extra, path / file, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(extra, file)
    save_file({"talker.only": torch.ones(2)}, path / "model-00004.safetensors", metadata={"format": "pt"})
    index["weight_map"]["talker.only"] = "model-00004.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = train(tmp_path_factory.mktemp("run") / "run", base, ADAPTERS[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def prompts(base):
    from omnitrain.models.qwen3_omni.processing import Processing

    processing = Processing(str(base), system=None, max_prompt_tokens=512)
    return [processing.encode(ROWS[kind]) for kind in ("text", "image", "audio", "image+audio")]


@torch.no_grad()
def logits(thinker, prompts) -> list[torch.Tensor]:
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        found.append(thinker.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), **prompt.features).logits[0, -1])
    return found


@torch.no_grad()
def trained_logits(policy, prompts) -> list[torch.Tensor]:
    return [policy.next_logits([(prompt, [])])[0] for prompt in prompts]


def assert_equal_logits(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name, lora in ADAPTERS.items() if lora])
def test_q6_the_adapter_loads_on_the_whole_model_with_equal_logits_also_on_audio(runs, base, prompts, name):
    from peft import PeftModel

    run, policy, _ = runs(name)
    out = export(run)
    assert out == run.path / "exports" / "step_2-adapter"
    whole = Whole.from_pretrained(base, dtype=torch.float32)
    unchanged = logits(whole.thinker, prompts)
    loaded = PeftModel.from_pretrained(whole, out)
    named = {n: p for n, p in loaded.named_parameters() if "lora_" in n}
    assert len(named) == len(policy.trainable()) and all(".thinker.model.layers." in n for n in named)
    # w1: nothing of the file is left over, and nothing of the model is left at its start.
    assert sorted(load_file(out / "adapter_model.safetensors")) == sorted(n.replace(".default", "") for n in named)
    expected = trained_logits(policy, prompts)
    assert_equal_logits(logits(loaded.base_model.model.thinker, prompts), expected)
    assert min((a - b).abs().max() for a, b in zip(unchanged, expected)) > 1e-2


@pytest.mark.parametrize("name", ADAPTERS)
def test_q6_the_merged_checkpoint_loads_with_equal_logits_in_the_published_layout(runs, base, prompts, name):
    run, policy, _ = runs(name)
    out = export(run, merged=True)
    assert_equal_logits(logits(Whole.from_pretrained(out, dtype=torch.float32).thinker, prompts), trained_logits(policy, prompts))
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    streamed = policy.expected_names()
    for file in sorted(name for name in names if name.endswith(".safetensors")):
        ours, theirs = load_file(out / file), load_file(base / file)
        assert list(ours) == list(theirs) or set(ours) == set(theirs)
        for tensor in theirs:
            assert ours[tensor].dtype == theirs[tensor].dtype
            if tensor not in streamed or tensor.startswith(("talker.", "code2wav.")):
                assert torch.equal(ours[tensor], theirs[tensor]), tensor
    for file in names - {name for name in names if name.endswith(".safetensors")}:
        assert (out / file).read_bytes() == (base / file).read_bytes()


def test_the_merged_checkpoint_is_what_the_engine_was_given(runs):
    run, policy, _ = runs("attention+experts")
    out = export(run, merged=True, out=run.path.parent / "as-streamed")
    files = {name: load_file(out / name) for name in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")}
    stored = {name: tensor for file in files.values() for name, tensor in file.items()}
    for name, tensor in policy.stream_weights():
        torch.testing.assert_close(stored[name], tensor, atol=1e-7, rtol=0)


def test_bfloat16_checkpoints_stay_bfloat16_and_rounded_once(tmp_path):
    base = write_tiny(tmp_path / "model", dtype="bfloat16")
    run, policy, _ = train(tmp_path / "run", base, ADAPTERS["attention+experts"])
    stored = load_file(export(run, merged=True) / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for name, tensor in policy.stream_weights():
        assert torch.equal(stored[name], tensor.bfloat16()) or (stored[name] != tensor.bfloat16()).float().mean() < 1e-3, name


@pytest.mark.parametrize("merged", [False, True])
def test_ema_exports_the_moving_average(runs, prompts, base, merged):
    from peft import PeftModel

    run, policy, ema = runs("attention+experts")
    out = export(run, merged=merged, ema=True)
    assert out.name.endswith("-ema")
    whole = Whole.from_pretrained(out if merged else base, dtype=torch.float32)
    thinker = whole.thinker if merged else PeftModel.from_pretrained(whole, out).base_model.model.thinker
    with ema.swapped():
        expected = trained_logits(policy, prompts)
    assert_equal_logits(logits(thinker, prompts), expected)
    assert (expected[0] - trained_logits(policy, prompts)[0]).abs().max() > 1e-3


def test_the_talkers_experts_are_never_adapted(runs, base):
    """By name alone its parameters end as the Thinker's do. Built empty: only the names matter."""
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3OmniMoeConfig

    run, policy, _ = runs("attention+experts")
    out = export(run, out=run.path.parent / "for the talker")
    config = Qwen3OmniMoeConfig.from_pretrained(base)
    config.enable_audio_output = True
    config.talker_config.text_config.shared_expert_intermediate_size = 64
    with init_empty_weights():
        whole = Whole(config)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name, _ in whole.talker.named_parameters())
    loaded = get_peft_model(whole, LoraConfig.from_pretrained(out), low_cpu_mem_usage=True)
    named = [name for name, _ in loaded.named_parameters() if "lora_" in name]
    assert len(named) == len(policy.trainable()) and all(".thinker." in name for name in named)


@pytest.mark.parametrize("name", [name for name, lora in ADAPTERS.items() if lora])
def test_a_run_and_its_exported_adapter_are_the_same_start(runs, name):
    run, policy, _ = runs(name)
    out = export(run, out=run.path.parent / "as a start")
    for source in (run.path, out, run.checkpoints / "step_2"):
        found, _ = load_source(source)
        assert (found.rank, found.alpha, found.targets) == (3, 6.0, sorted(ADAPTERS[name].module_names()))
        assert found.tensors.keys() == dict(policy.trainable()).keys()
        assert all(torch.equal(found.tensors[n], p) for n, p in policy.trainable())


def test_which_checkpoint_is_exported(runs):
    run, _, _ = runs("attention")
    newest, first, best = (export(run, out=run.path.parent / n, **o) for n, o in (("n", {}), ("f", {"step": 1}), ("b", {"best": True})))
    read = lambda path: load_file(path / "adapter_model.safetensors")  # noqa: E731
    name = next(name for name in read(newest) if "lora_B" in name)
    assert torch.equal(read(first)[name], read(best)[name]) and not torch.equal(read(first)[name], read(newest)[name])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("attention", {"step": 7}, "--step 7: .* has checkpoints of steps 1, 2"),
        ("full", {}, "trained all parameters.*--merged"),
    ],
)
def test_what_cannot_be_exported_is_said_with_what_can(runs, name, options, words):
    run, _, _ = runs(name)
    with pytest.raises(UsageError, match=words):
        export(run, **options)


def test_a_directory_without_run_checkpoint_average_or_best_is_named(runs, base, tmp_path):
    with pytest.raises(UsageError, match="holds no recipe.toml"):
        export(RunDir(tmp_path))
    run = RunDir(tmp_path / "run")
    run.prepare(recipe(base, ADAPTERS["attention"]))
    run.unlock()
    with pytest.raises(UsageError, match="no whole checkpoint"):
        export(run)
    policy = make_policy(base, ADAPTERS["attention"])
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    path = Checkpointer(run.checkpoints, say=lambda line: None).save(4, policy.module, optimizer, scheduler, {})
    with pytest.raises(UsageError, match="no moving average.*without --ema"):
        export(run, ema=True)
    with pytest.raises(UsageError, match="no checkpoint.keep_best.*step 4"):
        export(run, best=True)
    (path / "extra.pt").unlink()
    with pytest.raises(UsageError, match="extra.pt is missing"):
        export(run)


def test_an_output_directory_with_files_is_refused_and_untouched(runs, tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        export(runs("attention")[0], out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_base_checkpoint_that_is_gone_or_damaged_leaves_nothing_behind(runs, base, tmp_path, monkeypatch):
    moved = tmp_path / "model"
    shutil.copytree(base, moved)
    run, _, _ = train(tmp_path / "run", moved, ADAPTERS["attention"])
    (moved / "model-00004.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00004.safetensors"):
        export(run, merged=True, out=tmp_path / "out")
    shutil.rmtree(moved)
    with pytest.raises(ModelError, match="no such directory"):
        export(run, merged=True, out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_p4_a_full_disk_is_said_and_leaves_nothing_behind(runs, tmp_path, monkeypatch, capsys):
    import omnitrain.models.qwen3_omni.export as family

    def full(tensors, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(family, "save_file", full)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(runs("attention")[0].path), "--out", str(tmp_path / "out"), "--merged"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "No space left" in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_the_command_writes_and_says_where(runs, tmp_path, capsys):
    run = runs("attention+experts")[0]
    command = [sys.executable, "-m", "omnitrain", "export", str(run.path), "--out", str(tmp_path / "out"), "--best", "--ema"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"written to {tmp_path / 'out'}")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run.path), "--best", "--step", "1"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_vllm_loads_the_merged_checkpoint(runs, prompts, base):
    """In a process of its own: an engine is one per process."""
    run, policy, _ = runs("attention+experts")
    out = export(run, merged=True, out=run.path.parent / "for vllm")
    code = (
        "import sys, json\n"
        "from omnitrain.rollout.vllm_omni import VllmOmniEngine\n"
        "from omnitrain.rollout.engine import Request, Sampling\n"
        "from omnitrain.models.qwen3_omni.processing import Processing\n"
        "from tests.unit.models.conftest import ROWS\n"
        "processing = Processing(sys.argv[1], system=None, max_prompt_tokens=512)\n"
        "prompts = [processing.encode(ROWS[k]) for k in ('text', 'image', 'audio', 'image+audio')]\n"
        "engine = VllmOmniEngine(sys.argv[1], dtype='float32', max_model_len=600)\n"
        "requests = iter([Request(i, p, i) for i, p in enumerate(prompts)])\n"
        "found = list(engine.generate(lambda: next(requests, None), Sampling(2, 1.0, 8)))\n"
        "print('RESULT' + json.dumps([[s.group, s.tokens, s.logprobs] for s in found]))\n"
        "engine.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[6:])
    assert len(found) == 8
    for group, tokens, logprobs in found:
        with torch.no_grad():
            expected, _ = policy.logprobs([(prompts[group], tokens)])
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_the_sets_of_targets_are_what_the_docs_say():
    assert LORA_TARGETS["attention+experts"] == [*LORA_TARGETS["attention"], "gate_up_proj", "down_proj"]
