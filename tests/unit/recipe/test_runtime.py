"""Which differences of two recipes are runtime, and which are mathematics."""

import pytest

from omnitrain.recipe.fields import lookup
from omnitrain.recipe.loader import load
from omnitrain.recipe.runtime import RUNTIME, diff


@pytest.fixture
def changes(recipe_file):
    def between(sets=(), before=(), unsets=()):
        old, new = load([recipe_file()], before).recipe, load([recipe_file()], sets, unsets).recipe
        return {change.path: change for change in diff(old, new)}

    return between


def test_equal_recipes_do_not_differ(changes):
    assert changes() == {}


@pytest.mark.parametrize(
    ("flag", "path"),
    [
        ("name=other", "name"),
        ("trackers.tensorboard=true", "trackers.tensorboard"),
        ("gates.skip+=g6", "gates.skip"),
        ("rollout.sleep=off", "rollout.sleep"),
        ("checkpoint.every=3", "checkpoint.every"),
        ("validate.every=3", "validate.every"),
        ("train.epochs=11", "train.epochs"),
    ],
)
def test_runtime_fields(changes, flag, path):
    found = changes([flag])
    assert list(found) == [path] and found[path].kind == "runtime"


@pytest.mark.parametrize(
    ("flag", "path", "old", "new"),
    [
        ("seed=1", "seed", 42, 1),
        ("rollout.group_size=8", "rollout.group_size", 16, 8),
        ("train.learning_rate=1e-6", "train.learning_rate", 3e-6, 1e-6),
        ("train.epochs=9", "train.epochs", 10, 9),
        ("rewards[0].weight=2", "rewards[0].weight", 1.0, 2.0),
        ("model.lora.rank=8", "model.lora.rank", 32, 8),
        ("train.max_steps=5", "train.max_steps", None, 5),
    ],
)
def test_mathematics(changes, flag, path, old, new):
    change = changes([flag])[path]
    assert (change.old, change.new, change.kind) == (old, new, "mathematics")


def test_a_longer_run_is_mathematics_when_the_schedule_stretches_with_it(changes):
    before = ["train.schedule=cosine"]
    assert changes([*before, "train.epochs=11"], before)["train.epochs"].kind == "mathematics"


def test_a_table_that_goes_away_is_a_difference_of_its_fields(changes):
    found = changes(unsets=["model.lora"])
    assert found["model.lora.rank"].old == 32 and found["model.lora.rank"].new is None


def test_a_reward_added_is_mathematics(changes):
    assert changes(["rewards+={kind='math'}"])["rewards[1].kind"].kind == "mathematics"


def test_every_runtime_name_is_a_field_of_the_recipe():
    assert [name for name in RUNTIME if not lookup(name.rstrip("."))] == []
