"""Checkpoints written on some number of ranks and read on another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = "tests.integration.workers.sharded"

pytestmark = pytest.mark.timeout(600)


def run(action: str, folder: Path, ranks: int) -> tuple[list[dict], str]:
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += [WORKER, action, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{action}_{rank}.json").read_text()) for rank in range(ranks)], done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders saved by 1 and by 2 ranks, with what the ranks had."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"saved_{ranks}")
        found[ranks] = folder, run("save", folder, ranks)[0]
    return found


@pytest.mark.parametrize("writers, readers", [(2, 1), (1, 2), (2, 2)])
def test_p2_a_checkpoint_is_bitwise_the_same_on_another_number_of_ranks(saved, writers, readers):
    folder, wrote = saved[writers]
    read, out = run("load", folder, readers)
    for rank in range(readers):
        loaded, expected = dict(read[rank]["state"]), dict(wrote[0]["state"])
        # The frozen base is not in a checkpoint: it comes from the model directory.
        for name in ("frozen.weight", "frozen.bias"):
            assert loaded.pop(name) != expected.pop(name)
        assert loaded == expected
        assert read[rank]["extra"] == {"sampler": {"position": 7}, "updates": 3}
        if writers == readers:
            assert read[rank]["draws"] == wrote[rank]["draws"]
    assert (f"written by {writers} ranks, this run has {readers}" in out) == (writers != readers)


def test_p4_a_frozen_adapter_is_in_the_checkpoint_and_init_from_takes_it(saved):
    for _, wrote in saved.values():
        name = "lora_old.lora_A.weight"
        assert [result["init"][name] for result in wrote] == [result["state"][name] for result in wrote]


def test_g10_round_trip_of_the_sharded_state_is_bitwise_and_leaves_nothing(saved):
    for folder, wrote in saved.values():
        assert [result["unequal"] for result in wrote] == [[]] * len(wrote)
        assert wrote[0]["tensors"] == 5 + 4 * 3  # four trained and one frozen adapter; AdamW's three per trained one
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_3"]


def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_earlier_checkpoint(saved):
    folder, wrote = saved[2]
    for result in wrote:
        assert "no space for checkpoint" in result["full_disk"] and "rank 1: [Errno 28]" in result["full_disk"]
        assert "are free" in result["full_disk"] and "the last whole checkpoint is" in result["full_disk"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_3"]
