"""Rewards behind servers in whole runs, by the command line, on one rank with the trainer's own sampler."""

import json
import socket

import pytest

from omnitrain.cli.loopback import loopback
from omnitrain.data.schema import system_hash, write_rows
from tests.integration.test_bad_input import omnitrain

pytestmark = pytest.mark.timeout(300)
RECIPE = """
name = "endpoints"
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", validation = "{train}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "gspo" }}
rollout = {{ engine = "trainer", group_size = 2, max_new_tokens = 4 }}
train = {{ prompts_per_step = 8, max_tokens_per_device = 1024, learning_rate = 1e-3, max_steps = 1 }}
gates = {{ skip = ["g1", "g2", "g3", "g5", "g6", "g7", "g10"] }}
[[rewards]]
kind = "choice"
sources = ["mixed"]
[[rewards]]
kind = "math"
sources = ["numbers"]
[[rewards]]
kind = "length"
buffer = 2
weight = 0.5
[[rewards]]
kind = "http"
url = "{url}/score"
health = "/health"
media = true
[[rewards]]
kind = "unified_reward"
url = "{url}/v1"
model = "judge"
sources = ["mixed"]
"""


@pytest.fixture
def recipe(tmp_path, tiny_model, mixed_rows):
    """recipe(url) -> the file: rows with media of one source and sums of another."""

    def recipe(url):
        numbers = mixed_rows.parent / "numbers.parquet"
        rows = [
            {
                "id": f"sum-{i}",
                "messages": [{"role": "user", "content": [{"type": "text", "text": f"{i} + 1 = ?"}]}],
                "answer": str(i + 1),
                "source": "numbers",
            }
            for i in range(4)
        ]
        write_rows(numbers, rows, system_hash=system_hash(None))
        path = tmp_path / "recipe.toml"
        text = RECIPE.format(model=tiny_model, train=mixed_rows, url=url)
        path.write_text(text.replace(f'"{mixed_rows}"', f'["{mixed_rows}", "{numbers}"]'))
        return path

    return recipe


def test_rewards_of_servers_and_sources_work_together_in_a_run(recipe, tmp_path):
    with loopback(["judge"]) as url:
        code, text = omnitrain("train", recipe(url), "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert code == 0, text
    start, step = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:2]]
    assert start["val/mixed/rows"] == 8 and start["val/numbers/rows"] == 4
    assert {"val/mixed/accuracy", "val/numbers/accuracy"} <= start.keys()
    assert 0 <= step["reward/http/mean"] <= 1 and 0 <= step["reward/unified_reward/mean"] <= 1
    assert -1 <= step["reward/length/mean"] <= 0 and step["reward/failed"] == 0
    assert step["reward/unified_reward/seconds_max"] > 0
    log = (tmp_path / "run" / "logs" / "rewards_0.log").read_text()
    assert "omnitrain: unified_reward: " in log and "on sample mixed-" in log


def test_r7_a_server_that_is_not_there_ends_the_run_before_the_model_is_loaded(recipe, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        code, text = omnitrain("train", recipe(url), "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert code == 1, text
    assert f'rewards[3].url = "{url}/score" does not work: GET {url}/health: connection refused' in text
    assert "loading the policy" not in text and "Traceback" not in text


def test_a_source_without_a_reward_is_refused_before_the_model_is_loaded(recipe, tmp_path):
    with loopback(["judge"]) as url:
        path = recipe(url)
        path.write_text(path.read_text().split('[[rewards]]\nkind = "length"')[0].replace('"numbers"]', '"numbres"]'))
        code, text = omnitrain("train", path, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert code == 2, text
    assert 'rewards[1].sources: no row has the source "numbres"' in text and "loading the policy" not in text
