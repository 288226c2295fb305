"""The moving average of the weights: its formula, sharded as on one rank, swapped in and out, and resumed bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = "tests.integration.workers.average"


def run(action: str, folder: Path, ranks: int) -> dict:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", WORKER, action, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if "RESULT" in line).split("RESULT")[1])


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def whole(request, tmp_path_factory):
    return request.param, run("whole", tmp_path_factory.mktemp("whole"), request.param)


def test_the_average_is_the_closed_form_and_swaps_in_and_out_bit_for_bit(whole):
    _, found = whole
    assert found["closed form"] and found["inside"] and found["back"] and found["moved"]


def test_p2_a_resumed_average_goes_on_bit_for_bit_in_the_middle_of_its_period(whole, tmp_path):
    ranks, found = whole
    first = run("first", tmp_path, ranks)
    assert first["averages"] != found["averages"]
    assert run("second", tmp_path, ranks) == found


def test_two_ranks_average_as_one(tmp_path):
    one, two = run("whole", tmp_path / "one", 1), run("whole", tmp_path / "two", 2)
    assert two["answer"][0][0] == pytest.approx(one["answer"][0][0], abs=1e-6)
