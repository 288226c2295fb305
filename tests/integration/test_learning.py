"""The demos of `make demo-omni` learn, and their two controls do not (decision 48)."""

from pathlib import Path

import pytest

from tests.integration.test_run import metrics, train

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny"
SHUFFLED = '--set=rewards=[{kind="choice",weight=0.0},{kind="python",function="omnitrain.rewards.controls:shuffled_choice"}]'
FROZEN = "--set=train.learning_rate=0.0"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Demo:
    """A recipe with its paths set, run into folders of its own."""

    def __init__(self, recipe: str, folder: Path, metric: str, **fields: Path) -> None:
        self.recipe, self.folder, self.metric = RECIPES / f"{recipe}.toml", folder, metric
        self.sets = [f"--set={name.replace('__', '.')}={value}" for name, value in fields.items()]

    def curve(self, name: str, *extra: str) -> list[float]:
        """The validation metric of one run, from before the first step to the last."""
        run = self.folder / f"{self.recipe.stem}-{name}"
        train(self.recipe, run, *self.sets, *extra)
        return [line[self.metric] for line in metrics(run) if self.metric in line]

    def engines(self, name: str) -> set[str]:
        return {line["rollout/engine"] for line in metrics(self.folder / f"{self.recipe.stem}-{name}")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def avqa(folder, tiny_model) -> dict[str, Path]:
    """The quickstart's data, and a tiny model warmed up on it."""
    from omnitrain.data.converters import convert
    from omnitrain.data.demo import write_demo

    convert("avqa", [write_demo(folder / "raw")], folder / "avqa")
    files = {f"data__{split}": folder / "avqa" / f"{split}.parquet" for split in ("train", "validation")}
    warmup = files | {"data__train": folder / "avqa" / "warmup.parquet"}
    Demo("sft_warmup", folder, "val/avqa/loss", model__path=tiny_model, **warmup).curve("run")
    return files


def learns_beside_its_controls(demo: Demo, at_least: float, shuffled: str = SHUFFLED, chance: float = 0.35) -> None:
    curve = demo.curve("learns")
    assert curve[0] <= 0.5 and curve[-1] >= at_least, curve
    still = demo.curve("frozen", FROZEN, "--set=train.max_steps=2")
    assert still == [curve[0]] * len(still)
    noise = demo.curve("shuffled", shuffled)
    assert sum(noise[1:]) / len(noise[1:]) <= chance + 0.15, noise


@pytest.mark.parametrize("recipe", ["gspo_quickstart", "dapo"])
def test_all_weights_learn_a_picture_and_a_sound(recipe, avqa, folder, tiny_model):
    warm = folder / "sft_warmup-run"
    demo = Demo(recipe, folder, "val/avqa/accuracy", model__path=tiny_model, model__init_from=warm, **avqa)
    learns_beside_its_controls(demo, 0.9)
    assert demo.engines("learns") == {"vllm_omni"}


def test_adapters_learn_on_an_exported_model(avqa, folder):
    from omnitrain.export import export
    from omnitrain.rundir import RunDir

    merged = export(RunDir(folder / "sft_warmup-run"), out=folder / "warm", merged=True)
    learns_beside_its_controls(Demo("gspo_lora", folder, "val/avqa/accuracy", model__path=merged, **avqa), 0.85)


def test_gspo_learns_videos_with_and_without_a_tone(folder, tiny_model):
    from omnitrain.data.converters import convert
    from omnitrain.data.demo_nextqa import write_nextqa

    convert("nextqa", [write_nextqa(folder / "raw", warmup_noise=0.7)], folder / "nextqa")
    files = {f"data__{split}": folder / "nextqa" / f"{split}.parquet" for split in ("train", "validation")}
    warmup = files | {"data__train": folder / "nextqa" / "warmup.parquet"}
    Demo("sft_video_warmup", folder, "val/nextqa/loss", model__path=tiny_model, **warmup).curve("run")
    warm = folder / "sft_video_warmup-run"
    demo = Demo("gspo_video", folder, "val/nextqa/accuracy", model__path=tiny_model, model__init_from=warm, **files)
    learns_beside_its_controls(demo, 0.85)


def test_dpo_learns_preferences_of_every_modality_and_keeps_the_best_checkpoint(folder, tiny_model):
    from omnitrain.data.converters import convert
    from omnitrain.data.demo_preference import write_preference

    for name, shuffled in (("preference", False), ("shuffled", True)):
        convert("omni-preference", [write_preference(folder / name / "raw", shuffled=shuffled)], folder / name)
    files = {f"data__{split}": folder / "preference" / f"{split}.parquet" for split in ("train", "validation")}
    demo = Demo("dpo", folder, "val/all/accuracy", model__path=tiny_model, **files)
    learns_beside_its_controls(demo, 0.95, f"--set=data.train={folder}/shuffled/train.parquet", chance=0.5)
    kept = [path.name for path in (folder / "dpo-learns" / "checkpoints").iterdir()]
    best = max(metrics(folder / "dpo-learns"), key=lambda line: line.get("val/all/accuracy", 0))
    assert f"step_{best['step']}" in kept
