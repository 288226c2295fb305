"""`omnitrain rehearse` and `train` with the real worker: a run, its resumption on other ranks, and an outer torchrun."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OMNITRAIN = ["-m", "omnitrain"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *OMNITRAIN]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def command(*arguments) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    run = tmp_path_factory.mktemp("rehearsal") / "run"
    recipe = ROOT / "recipes" / "tiny" / "sft_warmup.toml"
    missing = ["--set", 'data.train="none/train.parquet"', "--set", 'data.validation="none/validation.parquet"']
    return run, command(*OMNITRAIN, "rehearse", recipe, "--run-dir", run, *missing)


def test_a_rehearsal_says_what_it_substitutes_and_leaves_a_whole_run(rehearsed):
    run, out = rehearsed
    assert "a tiny random model of the family" in out and "synthetic rows" in out and "the rehearsal passed" in out
    assert (run / "checkpoints" / "step_2" / "manifest.json").exists()
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    assert max(steps(run)) == 2


def test_p6_inside_an_outer_torchrun_and_resumed_by_the_launcher_on_one_rank(rehearsed, tmp_path):
    recipe, run = rehearsed[0] / "recipe.toml", tmp_path / "run"
    command(*TORCHRUN, "train", recipe, "--run-dir", run)
    assert (run / "logs" / "rank_1.log").exists() and max(steps(run)) == 2
    out = command(*OMNITRAIN, "train", recipe, "--run-dir", run, "--devices", 1, "--set", "train.max_steps=3")
    assert "changed: train.max_steps = 3 (was 2)" in out and "resuming after step 2" in out
    assert "written by 2 ranks, this run has 1" in out
    assert sorted(set(steps(run))) == [0, 1, 2, 3]


def test_two_nodes_share_a_run_directory(rehearsed, tmp_path):
    recipe, run = rehearsed[0] / "recipe.toml", tmp_path / "run"
    rendezvous = ["--", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{_free_port()}", "--rdzv-id", str(tmp_path)]
    node = [sys.executable, *OMNITRAIN, "train", recipe, "--run-dir", run, "--devices", "1", *rendezvous]
    nodes = [
        subprocess.Popen(list(map(str, node)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in "ab"
    ]
    outs = [process.communicate(timeout=600)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], outs
    assert sum("done: 2 steps" in out for out in outs) == 1
    assert json.loads((run / "checkpoints" / "step_2" / "manifest.json").read_text())["world_size"] == 2
