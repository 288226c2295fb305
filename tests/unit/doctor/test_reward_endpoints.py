"""The doctor asks the servers that a recipe's rewards need."""

import socket

import pytest

from omnitrain.cli.loopback import loopback
from omnitrain.doctor import recipe as checks
from omnitrain.launch import Accelerators
from omnitrain.recipe.loader import load

RECIPE = """
name = "r"
[model]
family = "qwen3_omni"
path = "model"
[data]
train = "train.parquet"
[algorithm]
kind = "gspo"
[rollout]
group_size = 2
[[rewards]]
kind = "unified_reward"
url = "{url}/v1"
model = "judge"
[[rewards]]
kind = "http"
url = "{url}/score"
[train]
prompts_per_step = 2
learning_rate = 1e-3
max_steps = 1
"""


@pytest.fixture
def found(tmp_path):
    def found(url, index, **fields):
        path = tmp_path / "recipe.toml"
        path.write_text(RECIPE.format(url=url))
        recipe = load([path], [f"rewards[{index}].{name}={value}" for name, value in fields.items()]).recipe
        return checks.reward(recipe, index, ["recipe.toml"])

    return found


def test_an_endpoint_that_answers_is_well(found):
    with loopback(["judge"]) as url:
        assert found(url, 0).status == "ok" and found(url, 0).detail == f"{url}/v1 answers"
        assert found(url, 1).status == "ok"


def test_a_judge_that_is_not_there_is_a_problem_with_the_command_that_serves_it(found, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setattr("omnitrain.launch.visible_accelerators", lambda: Accelerators("cpu", 1))
        problem = found(url, 0)
        assert problem.status == "problem" and "connection refused" in problem.detail and url in problem.detail
        assert problem.fix == f"vllm serve judge --port {port}"
        monkeypatch.setattr("omnitrain.launch.visible_accelerators", lambda: Accelerators("cuda", 4))
        fix = found(url, 0).fix
        assert fix.startswith(f"CUDA_VISIBLE_DEVICES=3 vllm serve judge --port {port}  #") and "--devices 3" in fix
        assert found(url, 1).fix.startswith(f"curl -i {url}/score")


def test_a_key_that_is_not_set_is_a_problem(found, monkeypatch):
    monkeypatch.delenv("SCORER_KEY", raising=False)
    problem = found("http://127.0.0.1:9", 1, api_key_env="SCORER_KEY")
    assert problem.status == "problem" and "SCORER_KEY" in problem.detail and "export SCORER_KEY" in problem.fix
