"""`model.adapter`: a run starts from another's adapter, keeps a copy of it, and has it as its reference."""

import shutil

import pytest
import torch
import torch.distributed as dist

from omnitrain.errors import ModelError
from omnitrain.export import export
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.models.qwen3_omni.spec import Lora
from omnitrain.rundir import RunDir
from omnitrain.train.adapter import start_adapter
from omnitrain.train.checkpoint import Checkpointer
from omnitrain.train.distributed import Ranks
from tests.integration.workers.trained import make_policy, recipe, train
from tests.unit.models.conftest import ANSWERS, ROWS, disturb

SPEC = Lora(rank=3, alpha=6, targets="attention+experts")


@pytest.fixture(scope="module")
def ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"), mesh=None)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def batch(tiny_model):
    processing = Processing(str(tiny_model), system=None, max_prompt_tokens=512)
    return [(processing.encode(row), answer) for row, answer in zip(ROWS.values(), ANSWERS, strict=True)]


@pytest.fixture
def first(tiny_model, tmp_path):
    """A finished run and its policy."""
    run, policy, _ = train(tmp_path / "first", tiny_model, SPEC)
    return run, policy


def begin(folder, tiny_model, source, ranks, spec=SPEC):
    """A second run that starts from `source`, as far as its policy."""
    made = recipe(tiny_model, spec)
    made = made.model_copy(update={"model": made.model.model_copy(update={"adapter": str(source)})})
    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    policy, said = make_policy(tiny_model, spec), []
    start_adapter(made, run, policy, ranks, said.append)
    return run, policy, said


def values(policy):
    return {name: p.detach().clone() for name, p in policy.trainable()}


@pytest.mark.parametrize("exported", [False, True])
def test_a_run_starts_as_a_copy_and_keeps_the_copy_as_its_reference(first, tiny_model, tmp_path, ranks, batch, exported):
    run, trained = first
    source = export(run) if exported else run.path
    second, policy, said = begin(tmp_path / "second", tiny_model, source, ranks)
    assert all(torch.equal(p, values(trained)[name]) for name, p in policy.trainable())
    assert str(source) in said[0]
    with torch.no_grad():
        before = policy.logprobs(batch)[0]
        disturb(policy, 0.05)
        moved = values(policy)
        with policy.reference():
            assert torch.equal(policy.logprobs(batch)[0], before)
        assert not torch.equal(policy.logprobs(batch)[0], before)
    assert all(torch.equal(p, moved[name]) for name, p in policy.trainable())


def test_p4_a_resumed_run_reads_its_own_copy_though_the_other_run_moved_on_and_is_gone(first, tiny_model, tmp_path, ranks):
    run, trained = first
    second, policy, _ = begin(tmp_path / "second", tiny_model, run.path, ranks)
    started = values(policy)

    # A start that came to nothing takes the other run as it is by now.
    disturb(trained, 0.05)
    save(run, trained, 9)
    now = values(trained)
    again = begin(second.path, tiny_model, run.path, ranks)[1]
    assert any(not torch.equal(again._start[name], started[name]) for name in now)
    assert all(torch.equal(again._start[name], now[name]) for name in now)

    save(second, policy, 1)
    shutil.rmtree(run.path)
    resumed, said = begin(second.path, tiny_model, run.path, ranks)[1:]
    assert all(torch.equal(resumed._start[name], now[name]) for name in now) and "this run's copy" in said[0]


def save(run: RunDir, policy, step: int) -> None:
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    Checkpointer(run.checkpoints, say=lambda line: None).save(step, policy.module, optimizer, scheduler, {})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Lora(rank=4, alpha=6, targets=SPEC.targets), "rank 3, and model.lora.rank is 4; set model.lora.rank = 3"),
        (Lora(rank=3, alpha=12, targets=SPEC.targets), "alpha 6.0, and model.lora.alpha is 12.0; set model.lora.alpha = 6.0"),
        (Lora(rank=3, alpha=6), r"targets \['down_proj', .*, and model.lora.targets is \['k_proj'.*set model.lora.targets = \["),
    ],
    ids=["rank", "alpha", "targets"],
)
def test_another_rank_alpha_or_targets_are_named_with_the_fix(first, tiny_model, tmp_path, ranks, spec, words):
    with pytest.raises(ModelError, match=words):
        begin(tmp_path / "second", tiny_model, first[0].path, ranks, spec)
    assert not RunDir(tmp_path / "second").starting_adapter.exists()


def test_what_is_no_adapter_is_said(tiny_model, tmp_path, ranks):
    full, _, _ = train(tmp_path / "full", tiny_model, None)
    empty = RunDir(tmp_path / "empty")
    empty.prepare(recipe(tiny_model, SPEC))
    empty.unlock()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text("{}")
    for source, words in (
        (full.path, "trained all parameters.*model.init_from instead"),
        (empty.path, "holds no whole checkpoint"),
        (damaged, "no readable PEFT adapter"),
        (tmp_path / "nowhere", "neither a run directory .* nor an adapter"),
    ):
        with pytest.raises(ModelError, match=words):
            begin(tmp_path / "second", tiny_model, source, ranks)
