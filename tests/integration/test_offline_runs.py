"""DPO's larger combinations: two ranks, videos, a starting adapter with a precomputed reference, and averaged weights."""

import json
import math
import subprocess
import sys

import pytest
import torch

from omnitrain.data.schema import system_hash, write_rows
from omnitrain.train.metrics import comparable
from omnitrain.train.state import TrainState
from tests.unit.models.conftest import clip, picture

pytestmark = pytest.mark.timeout(300)
RECIPE = """
name = "dpo"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
algorithm = {{ kind = "dpo" }}
train = {{ prompts_per_step = 6, prompts_per_update = 3, max_tokens_per_device = 640, learning_rate = 5e-3, max_steps = 4 }}
validate = {{ every = 1 }}
checkpoint = {{ every = 2 }}
[data]
train = "{folder}/train.parquet"
validation = "{folder}/validation.parquet"
max_prompt_tokens = 512
video = {{ min_pixels = 3136, max_pixels = 4096 }}
"""


def write_pairs(path, count: int, start: int = 0) -> None:
    """Text, a picture, a silent video and one with a track, in turn."""
    rows = []
    for index in range(start, start + count):
        media = [[], [picture()], [clip(8, 8, seed=index)], [clip(8, 8, hertz=500, seed=index)]][index % 4]
        content = [{"type": part.type, "data": part.data} for part in media]
        content.append({"type": "text", "text": f"Which one? Question {index}."})
        row = {"id": f"pair-{index}", "messages": [{"role": "user", "content": content}], "source": "pairs"}
        told = {"sound_track": index % 4 == 3} if index % 4 >= 2 else {}
        answers = {"chosen": "It is red." + " Yes." * (index % 3), "rejected": "No idea!" + " Hm." * (index % 4)}
        rows.append(row | answers | {"meta": told})
    write_rows(path, rows, system_hash=system_hash(None))


@pytest.fixture
def recipe(tmp_path, tiny_model):
    write_pairs(tmp_path / "train.parquet", 18)
    write_pairs(tmp_path / "validation.parquet", 7, start=100)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=tiny_model, folder=tmp_path))
    return path


def metrics(run) -> list[dict]:
    return [comparable(json.loads(line)) for line in run.metrics.read_text().splitlines()]


def weights(run) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in run.context.policy.trainable()}


def finished(one_rank, recipe, *sets, **options):
    with one_rank(recipe, *sets, **options) as run:
        run.train()
        return run.run, weights(run)


def table(run) -> dict[str, list[float]]:
    return json.loads(run.reference.read_text())["train"]


PRECOMPUTED = "algorithm.reference=precomputed"


def test_l4_two_ranks_with_a_precomputed_reference_train_as_one(one_rank, recipe):
    from omnitrain.rundir import RunDir

    alone, _ = finished(one_rank, recipe, PRECOMPUTED, name="alone")
    run = RunDir(recipe.parent / "two")
    command = [sys.executable, "-m", "omnitrain", "train", str(recipe), "--run-dir", str(run.path), "--devices", "2"]
    done = subprocess.run(
        [*command, "--set", PRECOMPUTED], cwd=recipe.parent, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ours, theirs = table(run), table(alone)
    assert ours.keys() == theirs.keys() and len(ours) == 18
    assert all(ours[row] == pytest.approx(theirs[row], abs=1e-4) for row in theirs)
    for step, (two, one) in enumerate(zip(metrics(run), metrics(alone), strict=True)):
        # Before the first update the difference of policy and reference is 0 up to rounding, and so of either sign.
        names = [name for name in one if not (name.endswith("accuracy") and step <= 1)]
        assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, abs=2e-4, rel=1e-3)
    assert metrics(run)[-1]["val/all/rows"] == 7


@pytest.mark.parametrize("track", ["false", "true", "separate"])
def test_pairs_with_videos_are_learned_with_and_without_their_tracks(one_rank, recipe, track):
    sets = (f"data.use_audio_in_video={track}", "data.batches=modality", "train.prompts_per_step=4")
    run, _ = finished(
        one_rank,
        recipe,
        *sets,
        "train.max_steps=8",
        "data.modality_weights={video=2}",
        unsets=["train.prompts_per_update"],
    )
    logged = metrics(run)
    assert logged[0]["val/video/loss"] == pytest.approx(math.log(2), abs=1e-6) and logged[0]["val/video/rows"] == 3
    assert logged[-1]["val/video/loss"] < 0.95 * math.log(2) and logged[-1]["val/video/accuracy"] == 1


def test_a_starting_adapter_is_the_reference_that_is_precomputed(one_rank, recipe):
    first, _ = finished(one_rank, recipe, name="first")
    begun = f"model.adapter={first.path}"
    live, there = finished(one_rank, recipe, begun, name="live")
    stored, here = finished(one_rank, recipe, begun, PRECOMPUTED, name="stored")
    base, _ = finished(one_rank, recipe, PRECOMPUTED, "train.max_steps=1", name="base")
    assert metrics(stored)[0]["val/all/loss"] == pytest.approx(math.log(2), abs=1e-5)
    sums = table(stored), table(base)
    assert all(abs(a - b) > 1e-3 for row in sums[0] for a, b in zip(sums[0][row], sums[1][row]))
    for step, (one, other) in enumerate(zip(metrics(live), metrics(stored), strict=True)):
        names = [name for name in one if not (name.endswith("accuracy") and step <= 1)]
        assert {n: other[n] for n in names} == pytest.approx({n: one[n] for n in names}, abs=1e-4, rel=1e-4)
    assert all((there[name] - here[name]).norm() <= 1e-3 * there[name].norm() for name in there)


@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_offline_validation_is_of_the_averaged_weights_and_training_of_its_own(one_rank, recipe, kind):
    sets = (f'algorithm={{kind="{kind}"}}',)
    plain, trained = finished(one_rank, recipe, *sets, name="plain")
    with one_rank(recipe, *sets, "train.ema={decay=0.7}", name="averaged") as run:
        loop = run._offline(TrainState(run.context))
        loop.run()
        assert all(torch.equal(trained[name], value) for name, value in weights(run).items())
        averages, loop.state.ema = loop.state.ema.averages, None
        again = loop.validate()
        with torch.no_grad():
            own = {name: p for name, p in run.context.policy.module.named_parameters() if p.requires_grad}
            for name, average in averages.items():
                own[name].copy_(average)
        of_averages = loop.validate()
    last, other = metrics(run.run)[-1], metrics(plain)[-1]
    assert {name: last[name] for name in of_averages} == of_averages
    assert {name: other[name] for name in again} == again
    (name,) = [name for name in again if name in ("val/all/loss", "val/pairs/loss")]
    assert abs(last[name] - other[name]) > 1e-3
    assert {n: v for n, v in last.items() if n.startswith("train/")} == {
        n: v for n, v in other.items() if n.startswith("train/")
    }
