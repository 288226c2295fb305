"""Ranks and micro-batches never change the mathematics (decision 3)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).parent / "workers" / "gradients.py"


def gradients(model: Path, data: Path, out: Path, sharding: str) -> dict[str, dict[str, torch.Tensor]]:
    ranks = sharding.count(",") + 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(WORKER)]
    done = subprocess.run(
        [*command, str(model), str(data), str(out), sharding], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def whole(tiny_model, mixed_rows, tmp_path_factory):
    """The gradients of all samples on one rank."""
    return gradients(tiny_model, mixed_rows, tmp_path_factory.mktemp("whole") / "gradients.pt", "8")


@pytest.mark.parametrize("sharding", ["1,7", "4,4"])
def test_gradients_with_kl_are_equal_on_one_rank_and_on_unequal_shards(
    whole, tiny_model, mixed_rows, tmp_path, sharding
):
    """GSPO, and DAPO's token mean with tokens that the rollout correction rejects."""
    shared = gradients(tiny_model, mixed_rows, tmp_path / "gradients.pt", sharding)
    for algorithm in ("gspo", "dapo"):
        one, other = whole[algorithm], shared[algorithm]
        assert one.keys() == other.keys()
        for name, gradient in one.items():
            assert gradient.norm() > 0, name
            assert (other[name] - gradient).norm() <= 1e-4 * gradient.norm(), (algorithm, name)
        norms = [torch.stack([g.norm() for g in found.values()]).norm().item() for found in (one, other)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
