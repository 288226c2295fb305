"""Whole DAPO runs through the command line, on two ranks and with the real engine, ended in the middle of a refill."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from omnitrain.train.metrics import comparable

pytestmark = pytest.mark.timeout(400)
# Counts its calls over all processes. At the call that the file `trap` names it ends its own rank, or asks the command
# to stop and waits until the ranks can see that: the reward's process is a child of its rank.
REWARD = """
import os, signal, time, zlib
from pathlib import Path

HERE = Path(__file__).parent

def score(response, row):
    with (HERE / "calls").open("ab") as file:
        file.write(b".")
    trap = HERE / "trap"
    if trap.exists() and (HERE / "calls").stat().st_size >= int(trap.read_text().split()[0]):
        _, number, target, stop = trap.read_text().split()
        try:
            trap.rename(HERE / "sprung")
        except FileNotFoundError:
            return 0.0
        os.kill(int(target) or os.getppid(), int(number))
        while not Path(stop).exists():
            time.sleep(0.05)
    return zlib.crc32(response.encode()) % 2
"""
RECIPE = """
name = "dapo"
seed = 5
deterministic = true
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "dapo" }}
rollout = {{ engine = "{engine}", group_size = 2, max_new_tokens = 6 }}
rewards = [{{ kind = "python", function = "coins:score" }}]
train = {{ prompts_per_step = 4, prompts_per_update = 2, max_tokens_per_device = 1024, learning_rate = 1e-3, max_steps = 5 }}
checkpoint = {{ every = 2 }}
gates = {{ skip = ["g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10"] }}
"""


def write(folder: Path, model: Path, rows: Path, engine: str) -> Path:
    (folder / "coins.py").write_text(REWARD)
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(model=model, train=rows, engine=engine))
    return path


def command(recipe: Path, name: str, ranks: int) -> list[str]:
    run = ["--run-dir", str(recipe.parent / name), "--devices", str(ranks)]
    return [sys.executable, "-m", "omnitrain", "train", str(recipe), *run]


def train(recipe: Path, name: str, ranks: int) -> Path:
    done = subprocess.run(command(recipe, name, ranks), cwd=recipe.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return recipe.parent / name


def metrics(run: Path) -> list[dict]:
    return [comparable(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(run / "checkpoints" / "step_5", run / "weights.pt")
    return torch.load(run / "weights.pt", weights_only=False)["model"]


def ended_in_a_refill(recipe: Path, whole: Path, ranks: int, how: int) -> subprocess.CompletedProcess:
    """Run until a sample of the second draw of a step is scored, then send the signal `how`."""
    logged = metrics(whole)
    victim = max(line["step"] for line in logged if line["rollout/draws"] > 1)
    assert victim > 2, "the seed has no refill after the first checkpoint"
    scored = sum(2 * line["rollout/prompts_drawn"] for line in logged[: victim - 1]) + 2 * 4
    (recipe.parent / "calls").unlink()
    run = recipe.parent / "run"
    process = subprocess.Popen(
        command(recipe, "run", ranks), cwd=recipe.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    target = 0 if how == signal.SIGKILL else process.pid
    (recipe.parent / "waiting").write_text(f"{scored + 1} {int(how)} {target} {run / 'stop'}")
    (recipe.parent / "waiting").rename(recipe.parent / "trap")
    output = process.communicate(timeout=300)[0]
    assert (recipe.parent / "sprung").exists(), output[-3000:]
    (recipe.parent / "sprung").unlink()
    assert len(metrics(run)) == victim - 1
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def same(run: Path, whole: Path, *, but: tuple[str, ...] = ()) -> None:
    for ours, theirs in zip(metrics(run), metrics(whole), strict=True):
        assert {k: v for k, v in ours.items() if k not in but} == {k: v for k, v in theirs.items() if k not in but}
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, brief_model, mixed_rows):
    """A recipe with the trainer's engine, and its uninterrupted run on two ranks."""
    recipe = write(tmp_path_factory.mktemp("two"), brief_model, mixed_rows, "trainer")
    return recipe, train(recipe, "whole", 2)


def test_two_ranks_draw_and_keep_what_one_does(two_ranks):
    recipe, whole = two_ranks
    alone = metrics(train(recipe, "alone", 1))
    for ours, theirs in zip(metrics(whole)[:3], alone[:3], strict=True):
        for name in ("draws", "prompts_drawn", "kept_ratio", "response_tokens_mean"):
            assert ours[f"rollout/{name}"] == theirs[f"rollout/{name}"]
        assert ours["train/reward_mean"] == theirs["train/reward_mean"] and ours["train/samples"] == 8
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)
    assert max(line["rollout/draws"] for line in alone[:3]) > 1


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, id="kill -9"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow)]
)
def test_p2_two_ranks_ended_in_a_refill_go_on_bit_exact(two_ranks, how):
    recipe, whole = two_ranks
    subprocess.run(["rm", "-rf", str(recipe.parent / "run")], check=True)
    done = ended_in_a_refill(recipe, whole, 2, how)
    kept = {path.name for path in (recipe.parent / "run" / "checkpoints").iterdir()}
    victim = len(metrics(recipe.parent / "run")) + 1
    if how == signal.SIGTERM:  # the state before the step whose refill was cut short
        assert done.returncode in (130, 143), done.stdout[-2000:]
        assert f"step_{victim - 1}" in kept
    else:
        assert done.returncode not in (0, 130, 143)
    run = train(recipe, "run", 2)
    # The trainer's engine measures its weights' change from its own start.
    same(run, whole, but=("sync/delta_norm",))


@pytest.mark.slow
def test_p2_a_run_with_the_real_engine_killed_in_a_refill_goes_on_bit_exact(tmp_path, brief_model, mixed_rows):
    recipe = write(tmp_path, brief_model, mixed_rows, "vllm_omni")
    whole = train(recipe, "whole", 1)
    assert all(line["rollout/pearson"] >= 0.9999 for line in metrics(whole))
    assert ended_in_a_refill(recipe, whole, 1, signal.SIGKILL).returncode != 0
    same(train(recipe, "run", 1), whole)
