"""Gates over videos with and without a sound track, in several files with rewards routed by source. One real engine."""

import dataclasses

import pytest

from omnitrain.data import video
from omnitrain.data.schema import system_hash, write_rows
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.recipe.data import Video
from omnitrain.train.state import TrainState
from tests.integration.conftest import one_rank_run
from tests.integration.test_gates import Parts, refusal, skipping
from tests.unit.models.conftest import clip

pytestmark = pytest.mark.timeout(300)
HEARD, SILENT = "video with sound", "video without sound"
REWARD = """
from pathlib import Path

def score(response, row):
    return 0.5

def rare(response, row):
    if Path(__file__).with_name("mode").read_text() == "raises":
        raise KeyError("no label")
    return 1.0
"""
RECIPE = """
name = "video-gates"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
algorithm = {{ kind = "gspo" }}
rollout = {{ group_size = 2, max_new_tokens = 8, max_concurrent = 32 }}
train = {{ prompts_per_step = 4, max_tokens_per_device = 1024, learning_rate = 1e-3, max_steps = 1 }}
rewards = [
  {{ kind = "python", function = "video_rewards:score", sources = ["clips", "words"] }},
  {{ kind = "python", function = "video_rewards:rare", sources = ["rare"] }},
]
[data]
train = ["{folder}/clips.parquet", "{folder}/words.parquet"]
max_prompt_tokens = 512
use_audio_in_video = true
video = {{ min_pixels = 3136, max_pixels = 9216, fps = 3.0 }}
"""


def rows(name: str, count: int, part=lambda index: None, meta=lambda index: {}, source=None):
    """Rows of one file; its last row is of `source`."""
    for index in range(count):
        media = [{"type": (p := part(index)).type, "data": p.data}] if part(index) else []
        content = [*media, {"type": "text", "text": f"What is it? Question {index}."}]
        message = {"role": "user", "content": content}
        own = source if source and index == count - 1 else name
        yield {"id": f"{name}-{index}", "messages": [message], "answer": "red", "source": own, "meta": meta(index)}


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("video-gates")
    clips = [clip(16, 8, hertz=500 if index % 2 else None, seed=index, size=(96, 96)) for index in range(6)]
    told = lambda index: {"sound_track": bool(index % 2)} if index < 4 else {}  # noqa: E731
    write_rows(folder / "clips.parquet", rows("clips", 6, clips.__getitem__, told), system_hash=system_hash(None))
    words = rows("words", 400, source="rare")
    write_rows(folder / "words.parquet", words, system_hash=system_hash(None))
    (folder / "video_rewards.py").write_text(REWARD)
    (folder / "mode").write_text("works")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(model=tiny_model, folder=folder))
    with pytest.MonkeyPatch.context() as patch, one_rank_run(patch, recipe) as prepared:
        loop = prepared._online(TrainState(prepared.context))
        parts = Parts(prepared.context, loop.rollouts, loop, folder / "mode")
        yield parts
        assert all(verdict.ok for verdict in parts.gates())  # after all mutations, each undone


def others(run: Parts, **changes) -> Processing:
    """The run's processing with other settings."""
    data = run.context.recipe.data
    settings = {"image": data.image, "video": data.video, "use_audio_in_video": data.use_audio_in_video} | changes
    return Processing(run.context.recipe.model.path, system=None, max_prompt_tokens=512, **settings)


def trainer_sees(run: Parts, monkeypatch, processing: Processing) -> None:
    """The engine is given its prompts as before; what the trainer sees of the same rows is from `processing`."""
    real = run.loop.source.encode

    def encode(index):
        prompt = real(index)
        other = processing.encode(prompt.row)
        return dataclasses.replace(prompt, ids=other.ids, features=other.features, positions=other.positions)

    monkeypatch.setattr(run.loop.source, "encode", encode)


def disagreeing(detail: str) -> set[str]:
    return set(detail.split(": ")[0].removesuffix(" disagree").removesuffix(" disagrees").split(", "))


def test_gates_pass_on_videos_with_and_without_a_track_and_on_a_row_of_every_source(run):
    found = {verdict["gate"]: verdict for verdict in run.verdicts()}
    assert len(found) == 8 and all(v["ok"] and not v["skipped"] for v in found.values())
    for kind in ("text", HEARD, SILENT):
        assert f"{kind}: Pearson 1.0000" in found["g6"]["detail"]
    assert found["g7"]["detail"] == f"equal prompt ids: 6 text, 4 {HEARD}, 4 {SILENT}"
    # Two of each kind, and the one row of 406 that is of the third source.
    assert "score: 6 of 6 rows, 0.5 to 0.5" in found["g9"]["detail"]
    assert "rare: 1 of 1 rows, 1 to 1" in found["g9"]["detail"]


def test_g7_fires_when_the_trainer_does_not_hear_the_track_that_the_engine_hears(run, monkeypatch):
    trainer_sees(run, monkeypatch, others(run, use_audio_in_video=False))
    detail = refusal(run, "g7", gates=skipping(run, {"g7"}))
    assert f"row clips-1 ({HEARD}): the engine saw" in detail and "first difference at position" in detail


def test_g7_fires_when_the_trainer_takes_another_number_of_frames(run, monkeypatch):
    trainer_sees(run, monkeypatch, others(run, video=Video(min_pixels=3136, max_pixels=9216, fps=2.0)))
    assert f"row clips-0 ({SILENT}): the engine saw" in refusal(run, "g7", gates=skipping(run, {"g7"}))


def test_g6_names_videos_when_the_trainer_takes_other_frames(run, monkeypatch):
    processing = others(run)
    with monkeypatch.context() as patch:
        at = video._Index.at
        patch.setattr(video._Index, "at", lambda index, second: at(index, second + 0.2))
        for row in run.context.train_rows.files[0]:
            processing.encode(row)  # kept
    trainer_sees(run, monkeypatch, processing)
    assert disagreeing(refusal(run, "g6", gates=skipping(run, {"g6", "g7"}))) == {HEARD, SILENT}


def test_g6_names_videos_with_sound_when_the_trainer_hears_something_else(run, monkeypatch):
    real = run.loop.source.encode

    def encode(index):
        prompt = real(index)
        features = dict(prompt.features)
        if "input_features" in features:
            features["input_features"] = features["input_features"].flip(-2)
        return dataclasses.replace(prompt, features=features)

    monkeypatch.setattr(run.loop.source, "encode", encode)
    assert disagreeing(refusal(run, "g6", gates=skipping(run, {"g6", "g7"}))) == {HEARD}


def test_g9_fires_when_the_reward_of_one_source_fails(run):
    run.mode.write_text("raises")
    try:
        detail = refusal(run, "g9")
    finally:
        run.mode.write_text("works")
    assert "1 of 7 canary scores failed, 0 are allowed; rare: row words-399: KeyError" in detail
