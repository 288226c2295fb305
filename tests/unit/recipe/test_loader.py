"""Merging, overrides, origins, and the resolved recipe that loads to itself."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnitrain.errors import RecipeError
from omnitrain.recipe.fields import all_fields, lookup
from omnitrain.recipe.loader import dump, load, resolved
from omnitrain.recipe.schema import Recipe
from omnitrain.recipe.shipped import all_shipped


def problem(*args) -> str:
    with pytest.raises(RecipeError) as caught:
        load(*args)
    return str(caught.value)


def test_later_files_win_tables_merge_and_lists_replace(recipe_file):
    first = recipe_file()
    second = Path("over.toml")
    second.write_text('seed = 7\n[model]\nlora.rank = 8\n[[rewards]]\nkind = "math"\n')
    loaded = load([first, second])
    recipe = loaded.recipe
    assert (recipe.seed, recipe.model.lora.rank, recipe.model.lora.alpha) == (7, 8, 64)
    assert [reward.kind for reward in recipe.rewards] == ["math"]
    assert loaded.origins["seed"] == "over.toml:1"
    assert loaded.origins["model.lora.rank"] == "over.toml:3"
    assert loaded.origins["model.lora.alpha"] == "recipe.toml:7"
    assert loaded.origins["rewards[0].kind"] == "over.toml:5"
    assert loaded.origins["model.dtype"] == "default"


def test_an_error_in_a_merged_file_names_that_file(recipe_file):
    first = recipe_file()
    Path("over.toml").write_text("\n[train]\nlrr = 1\n")
    assert problem([first, "over.toml"]).startswith("over.toml:3:1 unknown field train.lrr")


def test_origins_cover_every_field_of_the_resolved_recipe(recipe_file):
    loaded = load([recipe_file()], ["validate.every=5"])
    assert loaded.origins["validate.every"] == "--set"
    assert {"train.learning_rate", "trackers.wandb", "rewards[0].timeout", "gates.skip"} <= set(loaded.origins)


@pytest.mark.parametrize(
    ("flag", "path", "expected"),
    [
        ("seed=7", "seed", 7),
        ("train.learning_rate=1e-6", "train.learning_rate", 1e-6),
        ("train.learning_rate=1", "train.learning_rate", 1.0),
        ("name=other-name", "name", "other-name"),
        ('name="quoted"', "name", "quoted"),
        ("data.train=OUT/a b.parquet", "data.train", Path("OUT/a b.parquet")),
        ("data.system=", "data.system", None),
        ("data.system=Look, and listen.", "data.system", "Look, and listen."),
        ("data.system='a=b'", "data.system", "a=b"),
        ("data.system=a=b", "data.system", "a=b"),
        ("deterministic=true", "deterministic", True),
        ("train.betas=[0.8, 0.9]", "train.betas", (0.8, 0.9)),
        ("model.lora.rank=4", "model.lora.rank", 4),
        ("model.lora={alpha = 1}", "model.lora.alpha", 1.0),
        ("rewards[0].weight=0.5", "rewards[0].weight", 0.5),
        ("gates.skip+=g6", "gates.skip", ["g6"]),
        ('gates.skip+=["g6", "g5"]', "gates.skip", ["g6", "g5"]),
        ("rewards+={kind='math'}", "rewards[1].kind", "math"),
        ("trackers.wandb.project=p", "trackers.wandb.project", "p"),
        ("validate.every = 3", "validate.every", 3),
    ],
)
def test_set_takes_toml_and_bare_words(recipe_file, flag, path, expected):
    if expected is None:
        assert "no value; write data.system='\"\"' for an empty string" in problem([recipe_file()], [flag])
        return
    value = load([recipe_file()], [flag]).recipe
    for part in path.replace("[", ".").replace("]", "").split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, "validate_" if part == "validate" else part)
    assert value == expected


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("seed", "no value; write --set seed=VALUE"),
        ("=1", "is not a field name"),
        ("a..b=1", "is not a field name"),
        (".seed=1", "is not a field name"),
        ("seed.=1", "is not a field name"),
        ("seed=abc", "seed must be an integer, not a string"),
        ("deterministic=True", "write true in lower case"),
        ("data.validation=None", "write --unset data.validation"),
        ("name=123", "write --set 'name=\"123\"'"),
        ("train.betas=[0.9", "is not TOML"),
        ('name="x', "is not TOML"),
        ("gates.skip=[g6]", "does the shell need quotes?"),
        ("seed.x=1", "seed is 42, not a table"),
        ("rewards.weight=1", "rewards is a list; name an item, as rewards[0].weight"),
        ("rewards[3].weight=1", "rewards has 1 item, the first is rewards[0]"),
        ("seed[0]=1", "seed is not a list"),
        ("model.lora.rank+=1", "model.lora.rank is 32, not a list; use = instead of +="),
        ("model.lora.targets+=q_proj", "is not a list"),
        ("seed=1\nx=2", "not"),
    ],
)
def test_a_set_that_makes_no_sense_names_the_flag(recipe_file, flag, expected):
    text = problem([recipe_file()], [flag])
    assert text.startswith(f"--set {flag}") and expected in text


def test_the_last_of_two_sets_wins(recipe_file):
    assert load([recipe_file()], ["seed=1", "seed=2"]).recipe.seed == 2


def test_unset_takes_out_fields_tables_and_items_before_sets_apply(recipe_file):
    path = recipe_file()
    assert load([path], [], ["seed"]).recipe.seed == 0
    assert load([path], [], ["model.lora"]).recipe.model.lora is None
    loaded = load([path], ["rewards[0].weight=2"], ["model.lora.alpha"])
    assert loaded.origins["model.lora.alpha"] == "default"
    swapped = load([path], ["algorithm.kind=sft"], ["algorithm", "rollout", "rewards"])
    assert swapped.recipe.algorithm.kind == "sft"


def test_unsetting_a_list_item_moves_the_origins_of_those_after_it(recipe_file):
    path = recipe_file('kind = "choice"', 'kind = "choice"\n[[rewards]]\nkind = "math"\nweight = 2.0')
    loaded = load([path], [], ["rewards[0]"])
    assert loaded.recipe.rewards[0].kind == "math"
    assert loaded.origins["rewards[0].weight"] == "recipe.toml:23"


def test_unsetting_what_is_not_set_is_an_error(recipe_file):
    assert problem([recipe_file()], [], ["train.epoch"]) == (
        "--unset train.epoch: train.epoch is not set by the recipe; did you mean train.epochs?"
    )


def test_no_recipe_at_all_is_an_error():
    assert "no recipe given" in problem([])


@pytest.mark.parametrize("shipped", all_shipped(), ids=lambda item: item.name)
def test_a_shipped_recipe_loads_is_short_and_dumps_to_itself(shipped, tmp_path):
    assert sum(bool(line.strip()) for line in shipped.path.read_text().splitlines()) <= 40
    recipe = load([shipped.path]).recipe
    again = tmp_path / "again.toml"
    again.write_text(dump(recipe))
    assert load([again]).recipe == recipe


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
NUMBERS = st.floats(1e-12, 1e12)


@given(
    system=st.none() | TEXT,
    template=TEXT,
    rate=NUMBERS,
    betas=st.tuples(*2 * [st.floats(0, 1, exclude_max=True)]),
    targets=TEXT | st.lists(TEXT, max_size=3),
    weight=st.floats(-1e9, 1e9),
    skip=st.lists(st.sampled_from(["g1", "g6"]), max_size=2),
    seed=st.integers(0, 2**63 - 1),
    online=st.booleans(),
    project=st.none() | TEXT,
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dump_loads_to_an_equal_recipe(
    tmp_path, system, template, rate, betas, targets, weight, skip, seed, online, project
):
    data = {
        "name": "x",
        "seed": seed,
        "model": {"family": "qwen3_omni", "path": template, "lora": {"targets": targets}},
        "data": {"train": "a b.parquet", "system": system},
        "algorithm": {"kind": "gspo"} if online else {"kind": "sft", "template": template + "{answer}"},
        "train": {"prompts_per_step": 4, "learning_rate": rate, "betas": betas, "max_steps": 1},
        "validate": {"every": 2},
        "gates": {"skip": skip if online else [gate for gate in skip if gate in ("g3", "g10")]},
        "trackers": {"wandb": {"project": project} if project else None},
    }
    if online:
        rewards = [{"kind": "choice", "weight": weight}, {"kind": "python", "function": "a.b:c"}]
        data |= {"rollout": {"engine": "trainer"}, "rewards": rewards}
    recipe = Recipe.model_validate(data)
    path = tmp_path / "r.toml"
    path.write_text(dump(recipe), encoding="utf-8", newline="")
    assert load([path]).recipe == recipe


def test_resolved_runs_from_another_directory(recipe_file, tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    path = recipe_file('path = "Qwen/Qwen3-Omni-30B-A3B-Instruct"', 'path = "checkpoint"\ninit_from = "runs/warm"')
    recipe = load([path]).recipe
    fixed = resolved(recipe)
    assert fixed.data.train == tmp_path / "data" / "train.parquet"
    assert fixed.model.path == str(tmp_path / "checkpoint")
    assert fixed.model.init_from == str(tmp_path / "runs" / "warm")
    monkeypatch.chdir("/")
    assert resolved(fixed) == fixed


def test_a_resolved_sft_recipe_loads_again_without_the_fields_it_may_not_set(recipe_file, tmp_path):
    recipe = load([recipe_file()], ["algorithm.kind=sft"], ["algorithm", "rollout", "rewards"]).recipe
    text = dump(resolved(recipe))
    path = tmp_path / "again.toml"
    path.write_text(text)
    assert load([path]).recipe == resolved(recipe)
    assert "temperature" not in text and "groups" not in text


def test_resolved_leaves_a_hub_name_alone(recipe_file):
    recipe = load([recipe_file()]).recipe
    assert resolved(recipe).model.path == recipe.model.path


def test_every_field_is_documented():
    assert [field.path for field in all_fields() if not field.doc.strip()] == []


def test_lookup_finds_a_field_by_path_and_by_last_name():
    assert [field.path for field in lookup("train.learning_rate")] == ["train.learning_rate"]
    assert {field.path for field in lookup("every")} == {
        *("validate.every", "checkpoint.every", "samples.every", "train.ema.every"),
    }
    assert {field.kind[1] for field in lookup("rewards.kind")} >= {"choice", "math", "python"}
