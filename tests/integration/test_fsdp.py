"""A policy sharded over two ranks, which hold different modalities, is the policy of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omnitrain.models.qwen3_omni.processing import Processing
from tests.integration.workers.sharded_policy import ANSWERS, CASES, ROWS, SPLIT, examine, make, start

WORKER = "tests.integration.workers.sharded_policy"
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def sharded(tiny_model, tmp_path_factory) -> list[dict]:
    """What each of the two ranks found."""
    out = tmp_path_factory.mktemp("sharded") / "results.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", WORKER]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tiny_model), str(out)], capture_output=True, text=True, timeout=280, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{out}.{rank}") for rank in range(2)]


@pytest.fixture(scope="module")
def single(tiny_model) -> dict[str, dict]:
    """The same found by one process over all samples; per-sequence values split as the ranks were."""
    processing = Processing(str(tiny_model), system=None, max_prompt_tokens=512)
    pairs = [(processing.encode(row), answer) for row, answer in zip(ROWS.values(), ANSWERS, strict=True)]
    return {
        case: [examine(make(str(tiny_model), lora), share, 1) for share in (pairs[:SPLIT], pairs[SPLIT:])]
        for case, lora in CASES.items()
    }


def test_l5_logprobs_of_ranks_with_other_modalities_are_equal_before_and_after_the_weights_change(sharded, single, case):
    for rank in range(2):
        for name in ("reference", "logprobs", "later", "logits"):
            if name in single[case][rank]:
                torch.testing.assert_close(sharded[rank][case][name], single[case][rank][name], atol=1e-5, rtol=1e-5)
    assert ("reference" in sharded[0][case]) == (case != "full")


def test_gradients_are_the_sum_over_ranks(sharded, single, case):
    one, other = (s["gradients"] for s in single[case])
    assert sharded[0][case]["gradients"].keys() == one.keys()
    for name, found in sharded[0][case]["gradients"].items():
        expected = one[name] + other[name]
        assert expected.norm() > 0, name
        assert (found - expected).norm() <= 1e-4 * expected.norm(), name


def test_w6_every_rank_gathers_the_names_shapes_and_values_of_one_process(sharded, single, case):
    for rank in range(2):
        for stream in ("stream", "full stream"):
            found, expected = sharded[rank][case][stream], single[case][0][stream]
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rank_without_samples_takes_part_and_adds_nothing(sharded, single, case):
    for name, expected in single[case][0]["filler"].items():
        found = 2 * sharded[0][case]["filler"][name]  # FSDP averages over the two ranks
        assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-9, name


def test_trained_weights_restore_from_a_distributed_checkpoint_bit_for_bit(sharded, case):
    assert all(sharded[0][case]["restored"].values()) and sharded[0][case]["restored"]


def test_the_starting_adapter_is_the_reference_bit_for_bit_while_the_trained_one_moves(sharded, tiny_model, case):
    if CASES[case] is None:  # there is no adapter
        assert "start" not in sharded[0][case]
        return
    processing = Processing(str(tiny_model), system=None, max_prompt_tokens=512)
    pairs = [(processing.encode(row), answer) for row, answer in zip(ROWS.values(), ANSWERS, strict=True)]
    for rank, share in enumerate((pairs[:SPLIT], pairs[SPLIT:])):
        found, alone = sharded[rank][case]["start"], start(make(str(tiny_model), CASES[case]), share)
        for one in (found, alone):
            assert torch.equal(one["reference"], one["first"]) and one["kept"] and one["gradients"]
            assert (one["trained"] - one["first"]).abs().max() > 1e-3
        for name in ("first", "trained"):
            torch.testing.assert_close(found[name], alone[name], atol=1e-5, rtol=1e-5)


def test_bfloat16_computes_over_float32_weights_and_gradients(sharded, case):
    for rank in range(2):
        found = sharded[rank][case]["bfloat16"]
        assert found["dtypes"] == {"torch.float32"} == found["answers"] and found["stream"] == {"torch.bfloat16"}
        assert found["logprobs"].isfinite().all() and found["nonzero"]
