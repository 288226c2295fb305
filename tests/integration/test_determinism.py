"""`deterministic = true`, `[profile]` and `omnitrain bench --determinism`, through the command line with the real engine."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from omnitrain.train.metrics import comparable

pytestmark = pytest.mark.timeout(900)
RECIPE = """
name = "same"
seed = 5
deterministic = true
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", validation = "{train}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "gspo" }}
rollout = {{ group_size = 4, max_new_tokens = 8 }}
rewards = [{{ kind = "python", function = "vowels:score" }}]
train = {{ prompts_per_step = 4, prompts_per_update = 2, max_tokens_per_device = 640, learning_rate = 1e-3, max_steps = 3 }}
validate = {{ every = 2 }}
"""
REWARD = "def score(response, row):\n    return sum(c in 'aeiou' for c in response) / 10 + len(response) / 100\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_model, mixed_rows) -> Path:
    folder = tmp_path_factory.mktemp("determinism")
    (folder / "vowels.py").write_text(REWARD)
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(model=tiny_model, train=mixed_rows))
    return path


def omnitrain(recipe: Path, *args: str) -> str:
    command = [sys.executable, "-m", "omnitrain", args[0], str(recipe), *args[1:]]
    done = subprocess.run(command, cwd=recipe.parent, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def trained(recipe: Path, name: str, *args: str) -> tuple[list[dict], dict, Path, str]:
    """(what of metrics.jsonl is comparable, the last checkpoint's tensors, the run directory, what was printed)."""
    run = recipe.parent / name
    output = omnitrain(recipe, "train", "--run-dir", str(run), "--devices", "2", *args)
    lines = [comparable(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    dcp_to_torch_save(run / "checkpoints" / "step_3", run / "weights.pt")
    return lines, torch.load(run / "weights.pt", weights_only=False), run, output


def leaves(value, path=""):
    """The tensors and numbers of a nested dict, by path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key}")
    else:
        yield path, value


def test_l2_two_deterministic_runs_on_two_ranks_are_equal_in_every_bit_also_with_a_profile(recipe):
    first, first_state, _, _ = trained(recipe, "first")
    profile = "profile={steps=[2],memory=true,nvtx=true}"
    again, again_state, run, output = trained(recipe, "again", "--set", profile)
    assert [line["step"] for line in first] == [0, 1, 2, 3]
    assert first == again
    assert all(line["train/grad_norm"] > 0 for line in first[1:])
    ours, theirs = dict(leaves(first_state)), dict(leaves(again_state))
    assert ours.keys() == theirs.keys() and any(isinstance(value, torch.Tensor) for value in ours.values())
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name

    # The profile: a trace per rank of the one step, with the phases by name; what needs a GPU is said and left out.
    assert sorted(path.name for path in (run / "profile").glob("*.json.gz")) == [
        "step_2_rank_0.json.gz",
        "step_2_rank_1.json.gz",
    ]
    for path in (run / "profile").glob("*.json.gz"):
        names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"data", "sync", "rollout", "update", "logging"} <= names
    assert "aten::mm" in (run / "profile" / "step_2_rank_0.txt").read_text()
    assert "profile.memory" in output and "profile.nvtx" in output and "left out" in output


@pytest.mark.slow
def test_bench_determinism_prints_the_cost_as_a_ratio_and_that_two_runs_were_equal(recipe):
    output = omnitrain(recipe, "bench", "--determinism", "--steps", "2")
    assert "two runs with it: equal in every bit: metrics and trained weights" in output
    assert re.search(r"cost: \d+\.\d\d times the time of a step", output), output
