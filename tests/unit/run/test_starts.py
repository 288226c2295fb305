"""model.init_from and model.adapter are looked at before a rank starts: each refusal names the field, what is there and the fix."""

import json

import pytest

from omnitrain.recipe.loader import dump, load
from omnitrain.rundir import MANIFEST
from omnitrain.starts import problem

RECIPE = """
name = "s"
model = {{ family = "qwen3_omni", path = "m", {lora} }}
data = {{ train = "t.parquet" }}
algorithm = {{ kind = "sft" }}
train = {{ prompts_per_step = 1, learning_rate = 1e-3, max_steps = 1 }}
"""
LORA = 'lora = {{ rank = {rank}, alpha = 8, targets = "attention" }}'


def recipe(tmp_path, rank=4, **fields):
    path = tmp_path / "given.toml"
    path.write_text(RECIPE.format(lora=LORA.format(rank=rank) if rank else ""))
    return load([path], [f'model.{name}="{value}"' for name, value in fields.items()]).recipe


@pytest.fixture
def run(tmp_path):
    """A run of rank 4 with a checkpoint; `rank=0` trained all parameters."""

    def make(rank=4, whole=True):
        folder = tmp_path / "run"
        step = folder / "checkpoints" / "step_3"
        step.mkdir(parents=True)
        (folder / "recipe.toml").write_text(dump(recipe(tmp_path, rank)))
        if whole:
            (step / MANIFEST).write_text(json.dumps({"step": 3, "files": {}, "metrics": {}}))
        return folder

    return make


@pytest.mark.parametrize("field", ["init_from", "adapter"])
def test_a_start_that_fits_is_no_problem(tmp_path, run, field):
    folder = run()
    assert problem(recipe(tmp_path)) is None
    assert problem(recipe(tmp_path, **{field: folder})) is None
    assert problem(recipe(tmp_path, **{field: folder / "checkpoints" / "step_3"})) is None


@pytest.mark.parametrize("field", ["init_from", "adapter"])
def test_a_start_that_is_not_there_is_named(tmp_path, run, field):
    assert "none does not exist; name a run directory" in problem(recipe(tmp_path, **{field: "none"}))
    folder = run(whole=False)
    text = problem(recipe(tmp_path, **{field: folder}))
    assert text.startswith(f"model.{field} = {folder} holds no whole checkpoint; train that run first")
    assert "step_3 has no manifest" in text


def test_an_init_from_of_other_parameters_says_what_to_do(tmp_path, run):
    folder = run()
    assert "has rank 4, and model.lora.rank is 2; set model.lora.rank = 4" in problem(recipe(tmp_path, 2, init_from=folder))
    assert "trained an adapter, and this recipe has no model.lora" in problem(recipe(tmp_path, 0, init_from=folder))


def test_a_run_of_all_parameters_gives_no_adapter(tmp_path, run):
    folder = run(rank=0)
    assert "trained all parameters and has no adapter" in problem(recipe(tmp_path, adapter=folder))
    assert "trained all parameters, and this recipe an adapter" in problem(recipe(tmp_path, init_from=folder))
    assert problem(recipe(tmp_path, 0, init_from=folder)) is None


def test_an_exported_adapter_is_judged_by_its_config(tmp_path):
    folder = tmp_path / "exported"
    folder.mkdir()
    assert "neither a run directory" in problem(recipe(tmp_path, adapter=folder))
    (folder / "adapter_config.json").write_text("{")
    assert "no readable adapter_config.json" in problem(recipe(tmp_path, adapter=folder))
    (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    assert "has no adapter_model.safetensors" in problem(recipe(tmp_path, adapter=folder))
    (folder / "adapter_model.safetensors").touch()
    assert problem(recipe(tmp_path, adapter=folder)) is None
    assert "has rank 4, and model.lora.rank is 16" in problem(recipe(tmp_path, 16, adapter=folder))
