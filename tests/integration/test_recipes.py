"""The shipped Qwen3-Omni recipes, rehearsed: the whole path of each with a tiny model, real engine and real rewards.

One of each algorithm is in the fast set; together the fast ones see video, picture with sound, pairs of every modality,
dynamic sampling, an adapter on the experts, and reward endpoints.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnitrain.recipe.shipped import all_shipped

pytestmark = pytest.mark.timeout(900)
RECIPES = {item.path.stem: item.path for item in all_shipped() if item.name.startswith("qwen3_omni/")}
FAST = ("dapo_avqa_full_method", "dpo_omni_preference")


def rehearse(recipe: Path, folder: Path, *args: str) -> tuple[str, list[dict]]:
    """(what was printed, the lines of metrics.jsonl). Runs in an empty directory, where no data is."""
    command = [sys.executable, "-m", "omnitrain", "rehearse", str(recipe), "--run-dir", str(folder / "run"), *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, lines


def check(output: str, lines: list[dict], name: str) -> None:
    """Two steps that learned from something, every gate passed, and every substitution said."""
    assert "the rehearsal passed" in output and "a tiny random model of the family" in output
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["train/grad_norm"] > 0 for line in lines[1:])
    if name.startswith("dpo"):
        assert lines[1]["train/dpo_accuracy"] >= 0 and "rollout/engine" not in lines[1]
    else:
        assert all(line["rollout/pearson"] >= 0.9999 for line in lines[1:])
        assert output.count(" ok ") == 8 and "rewards[1]: not set -> python" in output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in sorted(RECIPES)]
)
def test_x2_a_shipped_recipe_rehearses(name, tmp_path):
    output, lines = rehearse(RECIPES[name], tmp_path)
    check(output, lines, name)


def test_a_rehearsal_answers_in_the_place_of_reward_endpoints(tmp_path):
    """gspo_nextqa, so that the judge is sent videos; no server of these names exists."""
    http = 'rewards+={kind="http",url="http://scores.invalid/score",api_key_env="NO_SUCH_KEY",health="/health"}'
    judge = 'rewards+={kind="unified_reward",url="http://judge.invalid/v1",model="judge"}'
    output, lines = rehearse(RECIPES["gspo_nextqa"], tmp_path, "--set", http, "--set", judge)
    assert "rewards[1].url: http://scores.invalid/score -> http://127.0.0.1:" in output
    assert "rewards[2].url: http://judge.invalid/v1 -> http://127.0.0.1:" in output
    for line in lines[1:]:
        assert 0 < line["reward/http/mean"] < 1 and 0 <= line["reward/unified_reward/mean"] <= 1
        assert line["train/grad_norm"] > 0 and line["reward/failed"] == 0
