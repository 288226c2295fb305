import shutil
from types import SimpleNamespace

import pytest

from omnitrain.doctor import recipe as checks
from omnitrain.evaluation.agreement import write_prompts
from omnitrain.launch import Accelerators
from omnitrain.recipe.loader import load

RECIPE = """
name = "r"
[model]
family = "qwen3_omni"
path = "{path}"
[data]
train = "{train}"
[algorithm]
kind = "gspo"
[rollout]
group_size = 2
[[rewards]]
kind = "choice"
[[rewards]]
kind = "python"
function = "my_rewards:score"
[train]
prompts_per_step = 2
learning_rate = 1e-3
max_steps = 1
"""


@pytest.fixture
def loaded(tmp_path):
    train = write_prompts(tmp_path / "data" / "train.parquet", per_modality=1)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(path=tmp_path / "model", train=train))
    return load([path])


def test_data_files_open_and_their_media_decode(loaded):
    (found,) = checks.data_files(loaded.recipe)
    assert found.status == "ok"
    assert "7 rows" in found.detail and "9 media files" in found.detail


def test_a_missing_data_file_is_a_problem(loaded, tmp_path):
    shutil.rmtree(tmp_path / "data")
    (found,) = checks.data_files(loaded.recipe)
    assert found.status == "problem" and "train.parquet" in found.detail


def test_a_truncated_picture_in_the_data_is_a_problem(loaded, monkeypatch):
    from omnitrain.data import media

    whole = media._decode_image
    monkeypatch.setattr(media, "_decode_image", lambda file: whole(type(file)(file.read()[:60])))
    (found,) = checks.data_files(loaded.recipe)
    assert found.status == "problem" and "image" in found.detail


def test_a_model_without_files_is_a_problem(loaded):
    found = checks.model(loaded.recipe)
    assert found.status == "problem" and "model" in found.detail


def test_rewards_import_or_say_what_is_missing(loaded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checks.reward(loaded.recipe, 0).status == "ok"
    found = checks.reward(loaded.recipe, 1)
    assert found.status == "problem" and "my_rewards" in found.detail
    (tmp_path / "my_rewards.py").write_text("def score(response, row):\n    return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert checks.reward(loaded.recipe, 1).status == "ok"
    (tmp_path / "my_rewards.py").write_text("raise RuntimeError('no licence')\n")
    assert "no licence" in checks.reward(loaded.recipe, 1).detail


def test_the_memory_line_is_the_plans_verdict(loaded):
    recipe = loaded.recipe.model_copy(update={"model": loaded.recipe.model.model_copy(update={"path": "Qwen/Qwen3-Omni-30B-A3B-Instruct"})})
    assert checks.memory(recipe, devices=1, memory_gib=8).status == "problem"


def test_on_a_cpu_the_verdict_is_about_free_main_memory(loaded, monkeypatch):
    monkeypatch.setattr("omnitrain.launch.visible_accelerators", lambda: Accelerators("cpu", 1))
    recipe = loaded.recipe.model_copy(update={"model": loaded.recipe.model.model_copy(update={"path": "Qwen/Qwen3-Omni-30B-A3B-Instruct"})})
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    assert checks.memory(recipe, None, None).status == "problem"
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2000 * 2**30))
    found = checks.memory(recipe, None, None)
    assert found.status == "ok" and "2000.0 GiB" in found.detail


def test_a_model_of_unknown_size_has_no_verdict_and_that_is_a_warning(loaded):
    recipe = loaded.recipe.model_copy(update={"model": loaded.recipe.model.model_copy(update={"path": "nobody/unknown"})})
    found = checks.memory(recipe, devices=1, memory_gib=80)
    assert (found.status, "not known" in found.detail) == ("warning", True)


def test_every_part_of_the_recipe_has_its_check(loaded):
    names = [check.name for check in checks.checks(loaded)]
    assert names == ["recipe data", "recipe model", "recipe rewards[0]", "recipe rewards[1]", "recipe memory"]


def test_fixes_name_the_recipe_and_real_paths(loaded, tmp_path, monkeypatch):
    for finding in (checks.model(loaded.recipe), checks.memory(loaded.recipe, 1, 8, ["a b.toml"])):
        assert not {"DIR", "RECIPE", "GIB", "N", "FILE"} & set(finding.fix.split()), finding.fix
    shutil.rmtree(tmp_path / "data")
    (found,) = checks.data_files(loaded.recipe)
    assert str(tmp_path / "data") in found.fix
    (tmp_path / "my_rewards.py").write_text("def score(response, row):\n    return 1.0\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fix = checks.reward(loaded.recipe, 1, [str(tmp_path / "recipe.toml")]).fix
    assert fix.startswith(f"export PYTHONPATH={tmp_path}")


def test_only_a_hub_name_is_to_be_downloaded(loaded):
    def fix(path):
        model = loaded.recipe.model.model_copy(update={"path": path})
        return checks.model(loaded.recipe.model_copy(update={"model": model})).fix

    assert fix("org/name") == "hf download org/name"
    for path in ("./name", "/nowhere/name", "a/b/c", "~/name"):
        assert "hf download" not in fix(path)
