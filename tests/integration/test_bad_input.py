"""What a user may do wrong, through the command line: a short error, the right exit code, nothing left running."""

import os
import subprocess
import sys
import time

import pytest

from tests.integration.test_loop import RECIPE
from tests.integration.test_run import alive

pytestmark = pytest.mark.timeout(300)
REWARD = """
import time

def score(response, row):
    if row["id"] == "mixed-3":
        time.sleep(600)
    return float(len(response))
"""


def omnitrain(*arguments, cwd, **environment) -> tuple[int, str]:
    """(exit code, all output)."""
    done = subprocess.run(
        [sys.executable, "-m", "omnitrain", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


def test_l6_one_ranks_hanging_reward_ends_all_ranks_and_names_the_sample(tmp_path, tiny_model, mixed_rows):
    (tmp_path / "loop_rewards.py").write_text(REWARD)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_model, train=mixed_rows))
    run = tmp_path / "run"
    # Every row, so that the one that hangs is among them; no validation, so that nothing comes before it.
    changes = ("--set", "train.prompts_per_step=8", "--set", "validate.at_start=false")
    code, text = omnitrain("train", "recipe.toml", "--run-dir", run, "--devices", 2, *changes, cwd=tmp_path)
    ended = time.time()
    assert code == 1, text
    assert 'reward "score" failed on sample mixed-3: took longer than its limit of 2 s' in text.splitlines()[-1]
    assert "Traceback" not in text
    assert not alive(run)
    # From the error to the end of the command: the ranks that wait in a collective are not waited for.
    assert ended - max(path.stat().st_mtime for path in run.glob("logs/rank_*.error")) < 20


def test_u4_offline_everything_from_demo_to_training_works(tmp_path):
    """No cache of the hub, no network: HF_ENDPOINT is a closed port, should anything ask."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    for arguments in (
        ("prepare", "tiny", "qwen3_omni", "model"),
        ("prepare", "demo", "raw", "--rows", 16),
        ("prepare", "avqa", "raw", "data"),
    ):
        code, text = omnitrain(*arguments, cwd=tmp_path, **offline)
        assert code == 0, text
    recipe = RECIPE.format(model=tmp_path / "model", train=tmp_path / "data" / "train.parquet")
    kept = [line for line in recipe.splitlines() if not line.startswith(("rollout", "rewards", "algorithm", "gates"))]
    (tmp_path / "recipe.toml").write_text("\n".join([*kept, 'algorithm = { kind = "sft" }']))
    code, text = omnitrain("train", "recipe.toml", "--set", "train.max_steps=1", cwd=tmp_path, **offline)
    assert code == 0 and "done: 1 steps" in text, text


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ('model.lora.targets=["nope"]', 2, 'model.lora.targets = ["nope"] matches no module: nope'),
        ("data.max_prompt_tokens=70000", 2, "70000 + 4 = 70004 is more than the model's 65536 positions"),
        ("rollout.group_size=1", 2, "set rollout.group_size to 2 or more"),
        ("train.prompts_per_update=3", 2, "nearest: prompts_per_step = 3 or 6"),
        (
            'rollout.engine="vllm_omni" rollout.tensor_parallel=2',
            2,
            "rollout.tensor_parallel = 2 does not divide the number of devices, 1",
        ),
        ('model.path="other"', 1, 'is a "qwen2" checkpoint, and model.family = "qwen3_omni" needs "qwen3_omni_moe"'),
        ('data.train="other"', 1, "data.train is a directory"),
        ('data.train="none.parquet"', 1, "none.parquet"),
    ],
)
def test_what_can_be_seen_before_a_run_leaves_nothing_behind(bad_recipe, change, code, words):
    sets = [word for field in change.split() for word in ("--set", field)]
    found, text = omnitrain("train", "recipe.toml", *sets, cwd=bad_recipe)
    assert found == code and words in text and "Traceback" not in text, text
    assert not (bad_recipe / "runs").exists()


def test_s2_an_engine_that_cannot_be_refilled_is_not_asked_to_drop_its_weights(bad_recipe):
    found, text = omnitrain("train", "recipe.toml", "--set", 'rollout.sleep="weights"', cwd=bad_recipe)
    assert found == 2 and 'rollout.sleep has no effect with rollout.engine = "trainer"' in text
    assert 'it belongs to rollout.engine = "vllm_omni"' in text


@pytest.fixture
def bad_recipe(tmp_path, tiny_model, mixed_rows):
    """A folder with a recipe that is whole until something is changed, and the model of another architecture."""
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_model, train=mixed_rows))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path
