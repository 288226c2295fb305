"""A start that is not there ends the command before a rank starts; a run that has its own checkpoint no longer needs it."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(600)

RECIPE = """
name = "start"
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 2, alpha = 4 }} }}
data = {{ train = "{train}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "sft" }}
train = {{ prompts_per_step = 2, max_tokens_per_device = 2048, learning_rate = 1e-3, max_steps = 1 }}
"""


def train(folder, *arguments):
    command = [sys.executable, "-m", "omnitrain", "train", "recipe.toml", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def recipe(tmp_path, tiny_model, mixed_rows):
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_model, train=mixed_rows))
    return tmp_path


@pytest.mark.parametrize("field", ["init_from", "adapter"])
def test_q3_a_start_that_is_not_there_is_refused_at_once_with_the_place(recipe, field):
    began = time.monotonic()
    code, text = train(recipe, "--set", f'model.{field}="none"')
    assert code == 2 and f'--set model.{field}="none": model.{field} = none does not exist' in text, text
    assert not (recipe / "runs").exists() and time.monotonic() - began < 20


@pytest.mark.slow
def test_p6_a_run_with_a_checkpoint_goes_on_when_the_run_it_started_from_is_gone(recipe):
    assert train(recipe, "--run-dir", "first")[0] == 0
    start = ("--run-dir", "second", "--set", 'model.init_from="first"')
    assert train(recipe, *start)[0] == 0
    shutil.rmtree(recipe / "first")
    code, text = train(recipe, *start, "--set", "train.max_steps=2")
    assert code == 0 and "resumed after step 1" in text, text
    lines = (recipe / "second" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-2:] == [1, 2]
