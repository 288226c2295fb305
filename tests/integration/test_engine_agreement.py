"""The engine and the trainer are the same model: measured as `omnitrain bench --agreement` does, on real processes."""

import json

import pytest

from omnitrain.doctor.engine import smoke
from omnitrain.doctor.ranks import two_ranks
from omnitrain.evaluation.agreement import MODALITIES, agreement_recipe
from omnitrain.launch import launch
from omnitrain.models.qwen3_omni.tiny import write_tiny
from omnitrain.recipe.loader import validated
from omnitrain.rundir import RunDir


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def _measure(tiny, folder, devices, **rollout):
    recipe = validated(
        {
            "name": "agreement",
            "model": {"family": "qwen3_omni", "path": str(tiny), "dtype": "float32", "lora": {"rank": 4, "alpha": 8}},
            "data": {"train": "none.parquet", "max_prompt_tokens": 256},
            "algorithm": {"kind": "gspo"},
            "rollout": {"group_size": 4, "max_new_tokens": 24, "max_concurrent": 32, **rollout},
            "rewards": [{"kind": "choice"}],
            "train": {"prompts_per_step": 4, "learning_rate": 1e-3, "max_steps": 1},
        }
    )
    run = RunDir(folder / "run")
    run.prepare(agreement_recipe(recipe, folder))
    assert launch(run, devices, module="omnitrain.train.bench") == 0
    return {line["modality"]: line for line in json.loads((run.path / "agreement.json").read_text())}


@pytest.mark.parametrize(
    ("devices", "rollout"),
    [
        pytest.param(1, {}, id="one rank"),
        pytest.param(2, {}, id="two ranks", marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel": 2}, id="two ranks, one engine", marks=pytest.mark.slow),
    ],
)
def test_engine_and_trainer_agree_on_every_modality_in_float32(tiny, tmp_path, devices, rollout):
    found = _measure(tiny, tmp_path, devices, **rollout)
    assert set(found) == set(MODALITIES)
    for modality, line in found.items():
        assert line["engine"] == "vllm_omni" and line["tokens"] > 50
        assert line["pearson"] >= 0.9999, (modality, line)
        assert line["abs_max"] <= 1e-4, (modality, line)


def test_two_ranks_reach_each_other():
    found = two_ranks()
    assert found.status == "ok", found


@pytest.mark.slow
def test_u5_an_engine_that_cannot_be_imported_is_the_doctors_problem(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('built for another torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = smoke()
    assert found.status == "problem" and "built for another torch" in found.detail
