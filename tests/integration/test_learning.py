"""The quickstart learns, and its two controls do not (decision 48)."""

from pathlib import Path

import pytest

from tests.integration.test_run import metrics, train

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny"
SHUFFLED = '[{kind="choice",weight=0.0},{kind="python",function="omnitrain.rewards.controls:shuffled_choice"}]'


@pytest.fixture(scope="module")
def warm(tmp_path_factory, tiny_model):
    """A tiny model warmed up as the quickstart does it, and the settings that lead a run there."""
    from omnitrain.data.converters import convert
    from omnitrain.data.demo import write_demo

    folder = tmp_path_factory.mktemp("learning")
    convert("avqa", [write_demo(folder / "raw")], folder / "data")
    common = [f"--set=model.path={tiny_model}", f"--set=data.validation={folder}/data/validation.parquet"]
    train(RECIPES / "sft_warmup.toml", folder / "warmup", *common, f"--set=data.train={folder}/data/warmup.parquet")
    common += [f"--set=data.train={folder}/data/train.parquet", f"--set=model.init_from={folder}/warmup"]
    return folder, common


def accuracies(folder: Path, name: str, common: list[str], *extra: str) -> list[float]:
    train(RECIPES / "gspo_quickstart.toml", folder / name, *common, *extra)
    lines = metrics(folder / name)
    assert {line["rollout/engine"] for line in lines} == {"vllm_omni"}
    return [line["val/avqa/accuracy"] for line in lines if "val/avqa/accuracy" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gspo_lifts_the_validation_reward_and_both_controls_stay_flat(warm):
    curve = accuracies(warm[0], "gspo", warm[1])
    assert curve[0] <= 0.5 and curve[-1] >= 0.9
    still = accuracies(warm[0], "zero-lr", warm[1], "--set=train.learning_rate=0.0")
    assert still == [curve[0]] * len(still)
    shuffled = accuracies(warm[0], "shuffled", warm[1], f"--set=rewards={SHUFFLED}")
    assert max(shuffled) <= curve[0] + 0.1
