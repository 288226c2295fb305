"""Engines on two torchrun ranks: one each, one shared by tensor parallelism, and the trainer's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)
WORKER = Path(__file__).parent / "workers" / "engines.py"


def run(model, rows, out: Path, tensor_parallel: int, kind: str) -> list[dict]:
    """What each of two ranks saw."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER)]
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    arguments = [str(model), str(rows), str(out), str(tensor_parallel), kind]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def samples(facts: dict, name: str) -> list:
    return sorted(map(tuple, ((g, c, tuple(t)) for g, c, t in facts[name])))


@pytest.fixture(scope="module")
def two_engines(tiny_model, mixed_rows, tmp_path_factory):
    return run(tiny_model, mixed_rows, tmp_path_factory.mktemp("ranks") / "two.json", 1, "vllm")


@pytest.fixture(scope="module")
def one_engine(tiny_model, mixed_rows, tmp_path_factory):
    return run(tiny_model, mixed_rows, tmp_path_factory.mktemp("ranks") / "tp.json", 2, "vllm")


def _sound(ranks):
    for facts in ranks:
        assert facts["changed"] and facts["taken"] and facts["expanded"] and not facts["ignored"]
        assert facts["scored"] >= 12 and facts["gap"] < 1e-4
        assert facts["sum"] == 5  # the trainer's collectives work beside the engine and after its end


def test_l3_one_engine_per_rank_agrees_with_the_sharded_trainer(two_engines):
    _sound(two_engines)
    assert all(facts["multiprocessing"] == "0" for facts in two_engines)


def test_l2_two_engines_answer_every_prompt_once(two_engines):
    first, second = (samples(facts, "shared") for facts in two_engines)
    assert first and second and not set(first) & set(second)
    assert sorted((g, c) for g, c, _ in first + second) == [(g, c) for g in range(8) for c in range(2)]
    assert {g for g, _, _ in samples(two_engines[0], "static")} == {0, 2, 4, 6}
    # The seed decides, not the rank: shared and static assignment give the same samples.
    static = samples(two_engines[0], "static") + samples(two_engines[1], "static")
    assert sorted(first + second) == sorted(static)
    assert sorted(facts["odd"] for facts in two_engines) == [0, 3]


def test_l1_tensor_parallel_peers_hold_the_same_samples_and_agree_with_the_trainer(one_engine, two_engines):
    _sound(one_engine)
    first, second = one_engine
    assert first["shared"] == second["shared"] and first["odd"] == second["odd"] == 3
    assert len(first["shared"]) == 16
    # Two ranks sharing an engine say what two engines say.
    apart = samples(two_engines[0], "shared") + samples(two_engines[1], "shared")
    assert samples(first, "shared") == sorted(apart)


def test_l4_the_trainer_engine_runs_in_lockstep_on_unequal_shares(tiny_model, mixed_rows, tmp_path):
    ranks = run(tiny_model, mixed_rows, tmp_path / "trainer.json", 1, "trainer")
    for facts in ranks:
        assert facts["changed"] and facts["gap"] < 1e-4 and facts["sum"] == 5
    assert sorted(facts["odd"] for facts in ranks) == [0, 3]
    assert len(ranks[0]["shared"]) + len(ranks[1]["shared"]) == 16
