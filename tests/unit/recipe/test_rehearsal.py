"""A rehearsal is small, and says everything it changed."""

import pytest

from omnitrain.recipe.loader import dump, load, resolved
from omnitrain.recipe.rehearsal import rehearsal
from omnitrain.recipe.runtime import diff
from omnitrain.recipe.shipped import all_shipped


@pytest.mark.parametrize("shipped", all_shipped(), ids=lambda item: item.name)
def test_every_shipped_recipe_rehearses_small_and_says_each_substitution(shipped, tmp_path):
    recipe = load([shipped.path]).recipe
    small, said = rehearsal(recipe, tmp_path)
    assert small.train.max_steps == 2 and small.train.prompts_per_step <= 4
    if small.rollout is not None:
        assert small.rollout.group_size <= 4 and small.rollout.max_new_tokens <= 16
        assert small.rollout.tensor_parallel == 1
    assert small.model.path == str(tmp_path / "model") and small.model.dtype == "float32"
    changed = {change.path for change in diff(resolved(recipe), small)}
    assert changed == {line.split(":")[0] for line in said}
    path = tmp_path / "recipe.toml"
    path.write_text(dump(small))
    assert load([path]).recipe == small


def test_several_updates_a_step_stay_several(recipe_file, tmp_path):
    small, _ = rehearsal(load([recipe_file()]).recipe, tmp_path)
    assert (small.train.prompts_per_step, small.train.prompts_per_update) == (4, 2)


def test_rows_that_are_here_are_used_and_others_become_synthetic(recipe_file, tmp_path):
    recipe = load([recipe_file()]).recipe
    small, said = rehearsal(recipe, tmp_path / "work")
    assert small.data.train == tmp_path / "work" / "data" / "train.parquet"
    assert any("synthetic rows" in line for line in said)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").touch()
    small, said = rehearsal(recipe, tmp_path / "work")
    assert small.data.train == tmp_path / "data" / "train.parquet"


def test_a_small_recipe_is_not_made_larger(recipe_file, tmp_path):
    sets = [
        "train.prompts_per_step=3",
        "train.prompts_per_update=3",
        "rollout.group_size=2",
        "rollout.max_new_tokens=5",
    ]
    small, _ = rehearsal(load([recipe_file()], sets).recipe, tmp_path)
    assert (small.train.prompts_per_step, small.train.prompts_per_update) == (3, 3)
    assert (small.rollout.group_size, small.rollout.max_new_tokens) == (2, 5)


def test_a_rehearsal_stays_off_the_network(recipe_file, tmp_path):
    small, said = rehearsal(load([recipe_file()], ["trackers.wandb.project=p"]).recipe, tmp_path)
    assert small.trackers.wandb is None
    assert any(line.startswith("trackers.wandb") for line in said)


def test_a_rehearsal_of_sft_sets_no_field_that_sft_may_not_have(recipe_file, tmp_path):
    recipe = load([recipe_file()], ["algorithm.kind=sft"], ["algorithm", "rollout", "rewards"]).recipe
    small, said = rehearsal(recipe, tmp_path)
    assert not [line for line in said if line.startswith("samples.")]
    path = tmp_path / "small.toml"
    path.write_text(dump(small))
    assert load([path]).recipe == small
