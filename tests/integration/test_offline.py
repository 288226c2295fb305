"""Preference training (DPO) in this process, on one rank and the tiny model: what it learns, leaves out and resumes."""

import json
import math
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from omnitrain.data.schema import RowFile, system_hash, write_rows
from omnitrain.errors import DataError, Interrupted, RunError, UsageError
from omnitrain.rundir import RunDir, request_stop
from omnitrain.train import setup
from omnitrain.train.metrics import comparable

pytestmark = pytest.mark.timeout(120)
RECIPE = """
name = "dpo"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", validation = "{validation}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "dpo" }}
train = {{ prompts_per_step = 4, max_tokens_per_device = 1024, learning_rate = 5e-3, max_steps = 3 }}
validate = {{ at_start = false }}
"""
MODALITIES = ("text", "image", "audio", "image+audio")


def pair(index: int, media: list[dict], **changes) -> dict:
    content = [*media, {"type": "text", "text": f"Which one? Question {index}."}]
    row = {"id": f"pair-{index}", "messages": [{"role": "user", "content": content}], "source": "pairs"}
    return (
        row | {"chosen": "It is red." + " Yes." * (index % 3), "rejected": "No idea!" + " Hm." * (index % 4)} | changes
    )


@pytest.fixture(scope="session")
def pairs(demo):
    """Writes `count` pairs, of the four modalities in turn, as `name`; `change` is per index."""
    source = RowFile(demo / "train.parquet")

    def write(name: str, count: int, change=lambda index: {}, start: int = 0):
        rows = []
        for index in range(start, start + count):
            kinds = MODALITIES[index % 4].split("+")
            media = [p for m in source[index % len(source)].messages for p in m.content if p.type in kinds and p.path]
            rows.append(pair(index, [{"type": p.type, "path": p.path} for p in media], **change(index)))
        path = demo / f"{name}.parquet"
        write_rows(path, rows, system_hash=system_hash(None))
        return path

    return write


@pytest.fixture(scope="session")
def train_pairs(pairs):
    return pairs("pairs-train", 18)


@pytest.fixture(scope="session")
def validation_pairs(pairs):
    return pairs("pairs-validation", 11, start=100)


@pytest.fixture
def start(tmp_path, tiny_model, train_pairs, validation_pairs, monkeypatch):
    """start(*overrides) -> a context manager that gives the Run; the directory is resumed if it is there."""
    from omnitrain.recipe.loader import load, resolved

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=tiny_model, train=train_pairs, validation=validation_pairs))

    @contextmanager
    def begin(*sets: str, name: str = "run", unsets=(), **options):
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        for variable, value in ranks.items():
            monkeypatch.setenv(variable, value)
        directory = RunDir(tmp_path / name)
        directory.prepare(resolved(load([recipe], sets, unsets).recipe), **options)
        try:
            with setup.Run(directory) as run:
                yield run
        finally:
            directory.unlock()
            if dist.is_initialized():
                dist.destroy_process_group()

    return begin


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def lines(run) -> list[dict]:
    return [json.loads(line) for line in run.run.metrics.read_text().splitlines()]


def numbers(run) -> list[dict]:
    return [comparable(line) for line in lines(run)]


def weights(run) -> dict[str, torch.Tensor]:
    """The trained parameters as they are now."""
    return {name: p.detach().full_tensor().clone() for name, p in run.context.policy.trainable()}


def drawn(run) -> list[int]:
    """Records the rows that the run's steps train on, from after the gates."""
    rows, begin = [], run._offline

    def begun(state):
        loop, logprobs = begin(state), run.context.policy.logprobs

        def watched(batch, *args, **kwargs):
            if torch.is_grad_enabled():
                rows.extend(prompt.row.index for prompt, _ in batch[::2])
            return logprobs(batch, *args, **kwargs)

        run.context.policy.logprobs = watched
        return loop

    run._offline = begun
    return rows


def finished(start, *sets, **options):
    with start(*sets, **options) as run:
        run.train()
        return run, weights(run)


def test_dpo_starts_at_log_two_and_learns_to_tell_the_pairs_apart(start):
    run, _ = finished(start, "train.max_steps=12", "validate.at_start=true", "train.prompts_per_update=2")
    logged = lines(run)
    before, after = logged[0], logged[-1]
    assert before["step"] == 0 and before["val/all/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before["val/all/margin"] == 0 and before["val/all/accuracy"] == 0
    assert after["val/all/accuracy"] >= 0.9 and after["val/all/loss"] < 0.5 < after["val/all/margin"]
    assert after["train/dpo_accuracy"] >= 0.9 and after["train/loss"] < 0.5 and after["train/updates"] == 24
    for where in ("train", "val/all"):
        margin = after[f"{where}/chosen_reward"] - after[f"{where}/rejected_reward"]
        assert after["train/dpo_margin" if where == "train" else "val/all/margin"] == pytest.approx(margin, abs=1e-5)
    assert [after[f"val/{name}/rows"] for name in (*MODALITIES, "all")] == [3, 3, 3, 2, 11]
    mean = sum(after[f"val/{name}/loss"] * after[f"val/{name}/rows"] for name in MODALITIES) / 11
    assert after["val/all/loss"] == pytest.approx(mean, rel=1e-5)


def test_the_first_loss_with_label_smoothing_and_of_ipo_are_those_of_the_closed_forms(start):
    options = ("train.max_steps=1", "algorithm.beta=0.2", "validate.at_start=true")
    smoothed, _ = finished(start, *options, "algorithm.label_smoothing=0.1", name="smoothed")
    assert lines(smoothed)[0]["val/all/loss"] == pytest.approx(math.log(2), abs=1e-6)
    ipo, _ = finished(start, *options, "algorithm.loss=ipo", "algorithm.average_logprobs=true", name="ipo")
    assert lines(ipo)[0]["val/all/loss"] == pytest.approx((1 / (2 * 0.2)) ** 2, rel=1e-6)


@pytest.mark.parametrize("average", ["true", "false"])
def test_precomputed_log_probs_train_as_the_adapter_does(start, average):
    options = (f"algorithm.average_logprobs={average}", "validate.every=1", "validate.at_start=true")
    live, there = finished(start, *options, name="live")
    stored, here = finished(start, *options, "algorithm.reference=precomputed", name="stored")
    assert (stored.run.path / "reference.json").exists() and not (live.run.path / "reference.json").exists()
    both = list(zip(numbers(live), numbers(stored), strict=True))
    for line in (*both[0], *both[1]):  # before the first update D is 0 up to rounding, and so of either sign
        for name in [name for name in line if name.endswith("accuracy") and (line["step"] == 0 or "train" in name)]:
            del line[name]
    # Sums of some 60 nats are rounded at 4e-6 in float32, their means below 1e-6; Adam widens it from the first step.
    rounding = 1e-6 if average == "true" else 4e-6
    for step, (one, other) in enumerate(both):
        assert other == pytest.approx(one, abs=2e-5 if step else rounding, rel=2e-5)
    assert all((there[name] - here[name]).norm() <= 1e-4 * there[name].norm() for name in there)


def test_a_run_without_an_adapter_trains_against_its_own_beginning_and_resumes(start):
    options = ("algorithm.reference=precomputed", "train.learning_rate=1e-3", "validate.every=1", "checkpoint.every=1")
    whole, trained = finished(start, *options, name="whole", unsets=["model.lora"])
    logged = lines(whole)
    assert logged[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert logged[-1]["val/all/loss"] < logged[0]["val/all/loss"] < math.log(2)
    with pytest.raises(Interrupted), start(*options, unsets=["model.lora"]) as run:
        stop_after(run, 2)
        run.train()
    run, resumed = finished(start, *options, unsets=["model.lora"])
    assert numbers(run) == numbers(whole)
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)
    shutil.copy(run.run.reference, run.run.path / "kept.json")
    run.run.reference.unlink()
    with pytest.raises(RunError, match="reference.json is gone, and this run has trained against it"):
        finished(start, *options, "train.max_steps=4", unsets=["model.lora"])


def stop_after(run, step: int) -> None:
    """Ask for a stop as Ctrl-C does, once the metrics of `step` are written."""
    write = run.context.metrics.write

    def watched(values):
        write(values)
        if values["step"] == step:
            request_stop(run.run, "step")

    run.context.metrics.write = watched


@pytest.mark.parametrize("batches", ["mixed", "modality"])
def test_p2_a_stop_inside_an_epoch_resumes_bit_exact_and_no_row_comes_twice_or_never(start, pairs, batches):
    # L4: 18 rows in steps of 4 leave half a step at the epoch's end, in the middle of the run.
    options = (f"data.batches={batches}", "train.max_steps=7", "validate.every=2", "checkpoint.every=3")
    with start(*options, name="whole") as whole:
        expected = drawn(whole)
        whole.train()
        trained = weights(whole)
    with pytest.raises(Interrupted), start(*options) as run:
        first = drawn(run)
        stop_after(run, 3)
        run.train()
    with start(*options) as run:
        rest = drawn(run)
        run.train()
        resumed = weights(run)
    assert first + rest == expected and len(expected) == 7 * 4
    assert numbers(run) == numbers(whole)
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)
    if batches == "mixed":
        assert sorted(expected[:16] + sorted(set(range(18)) - set(expected[:16]))) == list(range(18))
        assert len(set(expected[:16])) == 16 and set(range(18)) - set(expected[:16]) <= set(expected[16:20])
    else:
        for step in range(7):
            assert len({row % 4 for row in expected[4 * step : 4 * step + 4]}) == 1


def test_p2_a_checkpoint_lost_after_a_kill_replays_the_steps_since(start):
    options = ("train.max_steps=5", "checkpoint.every=2")
    whole, trained = finished(start, *options, name="whole")
    with pytest.raises(KeyboardInterrupt), start(*options) as run:
        write = run.context.metrics.write

        def dies(values):
            write(values)
            if values["step"] == 3:
                raise KeyboardInterrupt  # as a kill: nothing is saved after step 2

        run.context.metrics.write = dies
        run.train()
    again, resumed = finished(start, *options)
    assert numbers(again) == numbers(whole)
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)


# -- rows that are left out or refused


def test_a_row_without_a_rejected_response_is_found_before_anything_starts(start, pairs):
    path = pairs("half", 4, lambda index: {"rejected": None} if index == 2 else {})
    with pytest.raises(DataError, match="half.parquet: row pair-2 has no `rejected` response"):
        finished(start, f"data.train={path}")


def test_pairs_of_equal_responses_are_never_drawn_and_counted(start, pairs, capfd):
    path = pairs("ties", 12, lambda index: {"rejected": "Same.", "chosen": "Same."} if index in (1, 6) else {})
    with start(f"data.train={path}", f"data.validation={path}", "train.max_steps=5") as run:
        rows = drawn(run)
        run.train()
    assert set(rows) == set(range(12)) - {1, 6}
    assert lines(run)[-1]["val/all/rows"] == 10
    assert {line["data/ties"] for line in lines(run)} == {2}
    assert "2 of 12 pairs are left out" in capfd.readouterr().out
    every = pairs("all-ties", 4, lambda index: {"rejected": "Same.", "chosen": "Same."})
    with pytest.raises(DataError, match="the same text in every row"):
        finished(start, f"data.train={every}", name="ties")


def test_t2_too_long_a_response_or_pair_is_dropped_whole_and_counted(start, pairs):
    long = {3: {"rejected": "Hm. " * 60}, 8: {"chosen": "Yes. " * 170, "rejected": "No. " * 170}}
    path = pairs("long", 12, lambda index: long.get(index, {}))
    response = f"data.train={path}", "data.max_response_tokens=100", "train.max_steps=3"
    with start(*response, name="response") as run:
        rows, lengths = drawn(run), []
        logprobs = run.context.policy.logprobs

        def watched(batch, *args, **kwargs):
            lengths.extend(len(tokens) for _, tokens in batch)
            return logprobs(batch, *args, **kwargs)

        run.context.policy.logprobs = watched
        run.train()
    assert not {3, 8} & set(rows) and max(lengths) <= 100
    assert sum(line["data/overlong_dropped"] for line in lines(run)) == 2
    with start(f"data.train={path}", "train.max_steps=3", "train.max_tokens_per_device=600", name="pair") as run:
        rows = drawn(run)
        run.train()
    assert set(rows) == set(range(12)) - {8}
    with pytest.raises(DataError, match=r"row 'pair-\d': .* tokens.*; 1 such rows here; raise data.max_prompt_tokens"):
        finished(start, *response, "data.overlong=error", name="error")


def test_a_modality_whose_rows_are_all_too_long_is_an_error_by_name(start, pairs):
    path = pairs("long-text", 16, lambda index: {"chosen": "Yes. " * 200} if index % 4 == 0 else {})
    with pytest.raises(DataError, match="every text row of .*long-text.parquet is longer than"):
        finished(
            start, f"data.train={path}", "data.batches=modality", "data.max_response_tokens=100", "train.max_steps=30"
        )


def test_a_batch_of_one_modality_that_cannot_be_filled_is_an_error_by_name(start):
    with pytest.raises(DataError, match="audio has 4 training rows, fewer than train.prompts_per_step = 5"):
        finished(start, "data.batches=modality", "train.prompts_per_step=5")


# -- several files, validation, what is started


def test_files_are_drawn_by_weight_and_an_id_in_two_of_them_is_refused(start, train_pairs, validation_pairs):
    both = f'data.train=["{train_pairs}","{validation_pairs}"]'
    with start(both, "data.train_weights=[1,3]", "train.max_steps=4") as run:
        rows = drawn(run)
        run.train()
    assert sum(row >= 18 for row in rows) == 12 and len(rows) == 16
    assert run.context.train_rows[18].id == "pair-100"
    copied = shutil.copy(train_pairs, train_pairs.with_name("copied.parquet"))
    with pytest.raises(DataError, match=r"row 'pair-0' stands in .*pairs-train.parquet and in .*copied.parquet"):
        finished(start, f'data.train=["{train_pairs}","{copied}"]', name="twice")


def test_validation_takes_as_many_rows_of_each_modality(start, pairs):
    path = pairs("skewed", 9, start=200)
    balanced = f"data.validation={path}", "validate.balance=modality"
    run, _ = finished(start, *balanced, "validate.max_rows=11", "train.max_steps=1", name="two")
    assert [lines(run)[-1][f"val/{name}/rows"] for name in (*MODALITIES, "all")] == [2, 2, 2, 2, 8]
    with pytest.raises(DataError, match=r"validate.max_rows = 3 is less than one row for each modality \(audio, "):
        finished(start, *balanced, "validate.max_rows=3", name="three")


def test_the_best_checkpoint_is_kept_by_validation_accuracy(start):
    best = 'checkpoint.keep_best={metric="val/all/accuracy"}'
    run, _ = finished(
        start, best, "train.max_steps=8", "validate.every=2", "checkpoint.every=2", "checkpoint.keep_last=1"
    )
    scores = {line["step"]: line["val/all/accuracy"] for line in lines(run) if "val/all/accuracy" in line}
    first_best = min(step for step in scores if scores[step] == max(scores.values()))
    assert {path.name for path in run.run.checkpoints.iterdir()} == {f"step_{first_best}", "step_8"}
    with pytest.raises(UsageError, match="did you mean val/<task>/accuracy"):
        finished(start, 'checkpoint.keep_best={metric="val/all/acuracy"}', name="typo")


def test_a_changed_file_or_damaged_table_of_the_reference_is_refused_with_the_fix(start, pairs):
    path = pairs("first", 8)
    options = f"data.train={path}", "algorithm.reference=precomputed", "checkpoint.every=1"
    with pytest.raises(Interrupted), start(*options) as run:
        stop_after(run, 1)
        run.train()
    stored = run.run.reference.read_text()
    run.run.reference.write_text(stored[:100])
    with pytest.raises(RunError, match=r"reference.json is damaged .*; start a new run \(--fresh\)"):
        finished(start, *options)
    run.run.reference.write_text(stored)
    pairs("first", 8, lambda index: {"chosen": "It is blue."})
    with pytest.raises(RunError, match=r"computed from something else: the training rows changed since"):
        finished(start, *options)


def test_no_engine_and_no_reward_is_imported_for_an_offline_run(start):
    run, _ = finished(start, "train.max_steps=1", name="first")
    code = (
        "import sys; from pathlib import Path\n"
        "from omnitrain.train.worker import train; from omnitrain.rundir import RunDir\n"
        f"import os; os.environ['MASTER_PORT'] = {free_port()!r}\n"
        f"train(RunDir(Path({str(run.run.path)!r})))\n"
        "assert 'omnitrain.train.preference' in sys.modules\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('vllm', 'vllm_omni', 'math_verify')))"
    )
    shutil.rmtree(run.run.checkpoints)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"


# -- ranks


def pair_gradients(model, data, out, ranks: int) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    worker = ["-m", "tests.integration.workers.pairs", str(model), str(data), str(out)]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, *worker], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.timeout(400)
def test_l4_two_ranks_with_an_odd_pair_have_the_gradients_of_one(tiny_model, pairs, tmp_path):
    data = pairs("odd", 5)
    one, two = (pair_gradients(tiny_model, data, tmp_path / f"{n}.pt", n) for n in (1, 2))
    one.pop("plans")
    shares = [{row for batch in share for row, _ in batch} for share in two.pop("plans")]
    assert sorted(map(len, shares)) == [2, 3] and not shares[0] & shares[1]
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        assert gradient.norm() > 0, name
        assert (two[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
