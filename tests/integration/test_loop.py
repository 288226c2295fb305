"""The loops in this process, on one rank with the trainer's own sampler: orders of calls, stops, and what must not pass."""

import errno
import json
import shutil
import socket
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from omnitrain.data.schema import system_hash, write_rows
from omnitrain.errors import DataError, Interrupted, RewardTimeout, RunError, UsageError, environment_fault
from omnitrain.rollout.engine import State
from omnitrain.rollout.trainer import TrainerEngine
from omnitrain.rundir import RunDir, request_stop
from omnitrain.train import setup
from omnitrain.train.context import Clock
from omnitrain.train.prompts import PromptSource
from omnitrain.train.state import TrainState

pytestmark = pytest.mark.timeout(120)
REWARD = """
import os, time, zlib

def score(response, row):
    mode = os.environ.get("LOOP_REWARD", "")
    if mode == "hangs":
        time.sleep(600)
    return None if mode == "none" else zlib.crc32(response.encode()) % 7
"""
RECIPE = """
name = "loop"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", validation = "{train}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "gspo" }}
rollout = {{ engine = "trainer", group_size = 2, max_new_tokens = 4 }}
rewards = [{{ kind = "python", function = "loop_rewards:score", timeout = 2 }}]
train = {{ prompts_per_step = 4, prompts_per_update = 2, max_tokens_per_device = 1024, learning_rate = 1e-3, max_steps = 3 }}
validate = {{ every = 1, max_rows = 2 }}
checkpoint = {{ every = 1 }}
gates = {{ skip = ["g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10"] }}
"""


class Recorder(TrainerEngine):
    """The trainer's engine, and the order of the calls it got."""

    calls: list[str]
    during = lambda self: None  # noqa: E731
    """Called when the first sample of a rollout is out."""

    def wake(self, state=State.AWAKE):
        super().wake(state)
        self.calls.append(f"wake {state.name}")

    def sleep(self):
        super().sleep()
        self.calls.append("sleep")

    def load_weights(self, named, *, full=False):
        self.calls.append("load")
        return super().load_weights(named, full=full)

    def generate(self, pull, sampling):
        self.calls.append("generate")
        for index, sample in enumerate(super().generate(pull, sampling)):
            if not index:
                self.during()
            yield sample


@pytest.fixture
def start(tmp_path, tiny_model, mixed_rows, monkeypatch):
    """start(*overrides) -> a context manager that gives (Run, Recorder class); the directory is resumed if it is there."""
    from omnitrain.recipe.loader import load, resolved

    (tmp_path / "loop_rewards.py").write_text(REWARD)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=tiny_model, train=mixed_rows))
    monkeypatch.syspath_prepend(str(tmp_path))

    @contextmanager
    def begin(*sets: str, name: str = "run", unsets=()):
        class Engine(Recorder):
            calls: list[str] = []

        def build(recipe, *, policy, processing, **_):
            return Engine(policy, max_concurrent=8, eos_ids=processing.eos_ids, decode=processing.decode)

        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = str(listener.getsockname()[1])
        for variable, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(setup, "build_engine", build)
        directory = RunDir(tmp_path / name)
        directory.prepare(resolved(load([recipe], sets, unsets).recipe))
        try:
            with setup.Run(directory) as run:
                logprobs = run.context.policy.logprobs

                def watched(*args, **kwargs):
                    if torch.is_grad_enabled():
                        Engine.calls.append(f"update {run._engine.state.name}" if run._engine else "update")
                    return logprobs(*args, **kwargs)

                run.context.policy.logprobs = watched
                yield run, Engine
        finally:
            directory.unlock()
            if dist.is_initialized():
                dist.destroy_process_group()

    return begin


def lines(run) -> list[dict]:
    return [json.loads(line) for line in run.run.metrics.read_text().splitlines()]


def numbers(run) -> list[dict]:
    """metrics.jsonl without what a clock or a memory gave."""
    skip = ("time/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s")
    return [{k: v for k, v in line.items() if not k.startswith(skip) and "seconds" not in k} for line in lines(run)]


def test_s6_s7_s8_the_engine_wakes_for_weights_then_for_the_cache_and_sleeps_while_weights_are_trained(start):
    with start() as (run, engine):
        run.train()
        calls = engine.calls
    updates = [call for call in calls if call.startswith("update")]
    assert updates and set(updates) == {"update ASLEEP"}  # s8
    rollout = ["wake WEIGHTS", "load", "wake AWAKE", "generate", "sleep"]
    order = [call for index, call in enumerate(calls) if not call.startswith("update") or call != calls[index - 1]]
    # s7: the rollout after a validation starts from the same sleep as any other. The first finds the engine awake.
    gates, at_start = ["load", "sleep"], rollout
    assert order == gates + at_start + 3 * (rollout + ["update ASLEEP"] + rollout)
    logged = lines(run)[1:]
    assert logged[0]["sync/delta_norm"] == 0 and all(line["sync/delta_norm"] > 0 for line in logged[1:])  # w3


def test_sigterm_during_a_rollout_saves_the_state_before_it_and_resumes_to_the_same_numbers(start):
    with start(name="whole") as (whole, _):
        whole.train()
    with pytest.raises(Interrupted), start() as (run, engine):
        # From the first training rollout on, which follows the validation at the start.
        engine.during = lambda _: engine.calls.count("generate") == 2 and request_stop(run.run, "update")
        run.train()
    assert [path.name for path in run.run.checkpoints.iterdir()] == ["step_0"]
    with start() as (run, _):
        run.train()
    assert numbers(run) == numbers(whole)  # the validation at the start once, no prompt skipped or repeated


@pytest.mark.parametrize(
    "during, done",
    [
        ("model load", []),
        ("engine start", ["engine"]),
        ("gates", ["engine", "load"]),
        ("validation at the start", ["engine", "load", "load", "generate"]),
    ],
)
def test_ctrl_c_during_the_start_ends_it_there_and_saves_nothing(start, monkeypatch, during, done):
    with pytest.raises(Interrupted, match="stopped before step 1; nothing new to save"), start() as (run, engine):
        stop = lambda at: during == at and request_stop(run.run, "step")  # noqa: E731
        build, load = setup.build_engine, engine.load_weights

        def start_engine(*args, **kwargs):
            stop("engine start")
            engine.calls.append("engine")
            return build(*args, **kwargs)

        def load_weights(self, *args, **kwargs):
            stop("gates")
            return load(self, *args, **kwargs)

        monkeypatch.setattr(setup, "build_engine", start_engine)
        engine.load_weights = load_weights
        engine.during = lambda _: stop("validation at the start")
        stop("model load")
        run.train()
    assert [call for call in engine.calls if call in ("engine", "load", "generate")] == done
    assert not run.run.checkpoints.exists() or not list(run.run.checkpoints.iterdir())


def test_sigterm_before_a_validation_saves_without_it(start):
    with pytest.raises(Interrupted), start() as (run, engine):
        step = run.context.policy.module.train

        def train(*args):
            request_stop(run.run, "update")
            return step(*args)

        run.context.policy.module.train = train
        run.train()
    assert engine.calls.count("generate") == 2  # the validation at the start and the step
    assert (run.run.checkpoints / "step_1" / "manifest.json").exists()


def test_a_gradient_that_is_not_a_number_stops_before_the_weights_are_touched(start):
    with pytest.raises(RunError, match="gradient norm is nan"), start() as (run, _):
        before = {name: parameter.full_tensor().clone() for name, parameter in run.context.policy.trainable()}
        logprobs = run.context.policy.logprobs

        def broken(*args, **kwargs):
            logp, entropy = logprobs(*args, **kwargs)
            return logp * float("nan") if torch.is_grad_enabled() else logp, entropy

        run.context.policy.logprobs = broken
        run.train()
    after = dict(run.context.policy.trainable())
    assert all(torch.equal(tensor, after[name].full_tensor()) for name, tensor in before.items())
    assert not list(run.run.checkpoints.glob("step_*"))


def test_a_step_larger_than_the_file_answers_a_repeated_row_anew(start):
    with start("train.prompts_per_step=12", "train.max_steps=1", "validate.at_start=false") as (run, _):
        seen = {}
        state = TrainState(run.context)
        loop = run._online(state)
        rows, _ = loop.source.draw(state.sampler, 12)
        loop.rollouts.engine.wake()
        for sample in loop.sample(1, rows, Clock()):
            seen.setdefault(sample.row, {}).setdefault(sample.group, []).append(sample.tokens)
    repeated = [list(groups.values()) for groups in seen.values() if len(groups) > 1]
    assert len(repeated) == 4 and all(first != second for first, second in repeated)


def test_l6_a_reward_that_hangs_stops_the_step_soon_and_names_its_sample(start, monkeypatch):
    monkeypatch.setenv("LOOP_REWARD", "hangs")
    with pytest.raises(RewardTimeout, match=r"sample mixed-\d: took longer than its limit of 2 s"), start() as (run, _):
        started = time.monotonic()
        run.train()
    assert time.monotonic() - started < 2 + 5 + 5  # its limit, the five seconds it may be late, and the first rollout


def test_r2_skipping_every_sample_stops_with_the_reason(start, monkeypatch):
    monkeypatch.setenv("LOOP_REWARD", "none")
    skip = 'rewards=[{kind="python",function="loop_rewards:score",on_failure="skip"}]'
    with pytest.raises(RunError, match='2 of 2 samples(?s:.*)"score": returned None'), start(skip) as (run, _):
        run.train()


def test_validation_rows_that_are_all_too_long_are_an_error(start):
    with start() as (run, _):
        source = PromptSource(run.context.validation_rows, run.context.processing, run.ranks, "drop")
        run.context.processing._limit = 3
        with pytest.raises(DataError, match=r"none of the 2 rows of .* fits into data.max_prompt_tokens"):
            source.first(2)


def test_the_logged_learning_rate_is_that_of_the_steps_last_update(start):
    with start("train.warmup_updates=8", "train.max_steps=2", "validate.at_start=false") as (run, _):
        run.train()
    assert [line["train/learning_rate"] for line in lines(run)] == pytest.approx([1e-3 * 2 / 8, 1e-3 * 4 / 8])


def test_a_row_without_an_answer_is_found_before_sft_begins(start, mixed_rows, tmp_path):
    rows = [
        {"id": name, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hm?"}]}], "source": "text"}
        | ({} if name == "empty" else {"answer": "A"})
        for name in ("whole", "empty")
    ]
    write_rows(tmp_path / "rows.parquet", rows, system_hash=system_hash(None))
    sft = ('algorithm={kind="sft"}', f'data.train="{tmp_path / "rows.parquet"}"')
    with pytest.raises(DataError, match="rows.parquet: row empty has neither"):
        with start(*sft, unsets=["rollout", "rewards", "gates"]) as (run, _):
            run.train()
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()


def test_a_finished_run_starts_no_engine(start):
    with start("train.max_steps=1") as (run, _):
        run.train()
    before = lines(run)
    with start("train.max_steps=1") as (again, engine):
        again.train()
        assert again._engine is None and engine.calls == []
    assert lines(again) == before


def test_keeping_the_best_by_a_metric_that_is_never_written_is_refused(start):
    with pytest.raises(UsageError, match="did you mean train/reward_mean"):
        with start('checkpoint.keep_best={metric="train/reward_meen"}'):
            pass


def test_d1_a_picture_deleted_after_prepare_ends_the_run_by_name(start, mixed_rows, tmp_path):
    copied = shutil.copytree(mixed_rows.parent, tmp_path / "data")
    for picture in copied.rglob("*.png"):
        picture.unlink()
    with pytest.raises(DataError, match=r"\.png: missing image; .*prepare the data again"):
        with start(f'data.train="{copied / mixed_rows.name}"', "validate.at_start=false") as (run, _):
            run.train()


def test_a_disk_that_fills_up_is_named_and_keeps_the_last_checkpoint(start, monkeypatch):
    with pytest.raises(OSError) as caught, start() as (run, _):
        write = run.context.metrics.write

        def full(values):
            if values["step"] == 2:
                raise OSError(errno.ENOSPC, "No space left on device", str(run.run.metrics))
            write(values)

        run.context.metrics.write = full
        run.train()
    assert environment_fault(caught.value) == f"{run.run.metrics}: no space left; make room there"
    assert [path.name for path in run.run.checkpoints.iterdir()] == ["step_1"]
