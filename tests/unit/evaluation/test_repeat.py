"""What `bench --determinism` compares and says."""

import pytest

from omnitrain.evaluation.determinism import Repeated, difference, lines, repeated_recipe
from omnitrain.recipe.loader import load
from omnitrain.recipe.shipped import all_shipped
from omnitrain.train.metrics import comparable


def run(*losses, weights=("a", "b"), seconds=(9.0, 1.0, 3.0)):
    steps = [
        {"step": index + 1, "train/loss": loss, "time/step": seconds[index], "reward/choice/seconds_p50": seconds[index] / 7}
        for index, loss in enumerate(losses)
    ]
    return Repeated(True, steps, list(weights))


def test_times_are_no_difference_and_one_bit_of_a_number_is():
    one = run(0.1, 0.2, 0.3)
    assert difference(one, run(0.1, 0.2, 0.3, seconds=(1.0, 2.0, 3.0)), comparable) is None
    found = difference(one, run(0.1, 0.2000000000000001, 0.3), comparable)
    assert found == "step 2: train/loss is 0.2 and 0.2000000000000001"
    assert "weights" in difference(one, run(0.1, 0.2, 0.3, weights=("a", "c")), comparable)


def test_the_cost_is_the_ratio_of_median_step_times_without_the_first():
    off, on = run(1, 1, 1, seconds=(50.0, 1.0, 1.0)), run(1, 1, 1, seconds=(0.1, 1.5, 1.5))
    assert "cost: 1.50 times the time of a step" in lines(off, (on, on), None)
    assert "two runs with it: different: somewhere" in lines(off, (on, on), "somewhere")


@pytest.mark.parametrize("item", all_shipped(), ids=lambda item: item.name)
def test_every_shipped_recipe_can_be_repeated_for_a_few_steps(item):
    recipe = load([item.path]).recipe
    for on in (True, False):
        short = repeated_recipe(recipe, on, 3)
        assert (short.deterministic, short.train.max_steps, short.train.epochs) == (on, 3, None)
        assert short.data.validation is None and short.checkpoint.every is None
        assert short.train.prompts_per_step == recipe.train.prompts_per_step  # the recipe's own shapes
