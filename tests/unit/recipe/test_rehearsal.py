"""A rehearsal is small, and says everything it changed."""

import pytest

from omnitrain.data.files import RowFiles
from omnitrain.data.synthetic import write_synthetic
from omnitrain.recipe.loader import dump, load, resolved
from omnitrain.recipe.rehearsal import endpoints, rehearsal, synthetic_rows
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
    added = f"rewards[{len(recipe.rewards)}]"
    changed = {change.path for change in diff(resolved(recipe), small)}
    changed = {added if path.startswith(added) else path for path in changed}
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


def test_media_are_seen_small(recipe_file, tmp_path):
    small, said = rehearsal(load([recipe_file()]).recipe, tmp_path)
    video = small.data.video
    assert (video.min_frames, video.max_frames) == (4, 4) and video.min_pixels <= video.max_pixels <= 128 * 128
    assert small.data.image.max_pixels <= 128 * 128
    assert "data.video.max_frames: 8 -> 4" in said


def test_dapo_draws_twice_at_most_and_penalises_within_the_short_responses(recipe_file, tmp_path):
    sets = ["algorithm.kind=dapo", "algorithm.overlong_buffer=256"]
    small, said = rehearsal(load([recipe_file()], sets, ["algorithm"]).recipe, tmp_path)
    assert (small.algorithm.max_generation_batches, small.algorithm.overlong_buffer) == (2, 16)
    assert "algorithm.max_generation_batches: 10 -> 2" in said
    off = load([recipe_file()], ["algorithm.kind=dapo", "algorithm.dynamic_sampling=false"], ["algorithm"]).recipe
    assert rehearsal(off, tmp_path)[0].algorithm.dynamic_sampling is False


def test_several_files_stay_several_with_their_weights(recipe_file, tmp_path):
    sets = ['data.train=["a/train.parquet","b/train.parquet"]', "data.train_weights=[1.0,3.0]"]
    recipe = load([recipe_file()], sets).recipe
    small, said = rehearsal(recipe, tmp_path / "work")
    folder = tmp_path / "work" / "data"
    assert [file.path for file in small.data.train_files] == [folder / "train.parquet", folder / "train_2.parquet"]
    assert [file.weight for file in small.data.train_files] == [1.0, 3.0]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.parquet").touch()
    small, _ = rehearsal(recipe, tmp_path / "work")
    assert [file.path for file in small.data.train_files] == [tmp_path / "a" / "train.parquet", folder / "train.parquet"]


def test_a_starting_adapter_is_left_out_and_the_moving_average_stays(recipe_file, tmp_path):
    recipe = load([recipe_file()], ["model.adapter=runs/dpo", "train.ema.decay=0.5"]).recipe
    small, said = rehearsal(recipe, tmp_path)
    assert small.model.adapter is None and small.train.ema == recipe.train.ema
    assert any(line.startswith("model.adapter:") and "another size" in line for line in said)


def test_reward_endpoints_become_the_loopback_and_length_fits_the_short_responses(recipe_file, tmp_path):
    rewards = (
        'rewards=[{kind="http",url="https://scores.example:9/a/score",api_key_env="KEY",health="/health"},'
        '{kind="unified_reward",url="http://judge.example/v1",model="judge"},'
        '{kind="length",buffer=100,limit=1000}]'
    )
    recipe = load([recipe_file()], [rewards], ["rewards"]).recipe
    assert endpoints(recipe) == (True, ["judge"])
    small, said = rehearsal(recipe, tmp_path, "http://127.0.0.1:5")
    http, judge, length, varied = small.rewards
    assert (http.url, http.api_key_env) == ("http://127.0.0.1:5/a/score", None)
    assert judge.url == "http://127.0.0.1:5/v1"
    assert (length.buffer, length.limit) == (16, 16)
    assert varied.function == "omnitrain.rewards.controls:varied"
    assert {"rewards[0].url", "rewards[0].api_key_env", "rewards[1].url"} <= {line.split(": ")[0] for line in said}
    assert endpoints(load([recipe_file()]).recipe) == (False, [])


def test_a_profile_looks_at_a_step_that_comes(recipe_file, tmp_path):
    small, _ = rehearsal(load([recipe_file()], ["profile.steps=[1,30,40]"]).recipe, tmp_path)
    assert small.profile.steps == [1, 2]


@pytest.mark.parametrize(
    ("name", "modalities", "labels", "pairs"),
    [
        ("gspo_gsm8k", ("text",), {"gsm8k": "4"}, False),
        ("gspo_mmk12", ("image",), {"mmk12": "A"}, False),
        ("gspo_avqa", ("image+audio",), {"avqa": "<answer>A</answer>"}, False),
        ("gspo_nextqa_full", ("video",), {"nextqa": "<answer>A</answer>"}, False),
        ("dpo_omni_preference", ("image", "audio", "video"), {"omni_preference": "<answer>A</answer>"}, True),
    ],
)
def test_synthetic_rows_hold_what_the_recipes_data_set_holds(name, modalities, labels, pairs):
    recipe = load([next(item.path for item in all_shipped() if item.path.stem == name)]).recipe
    wanted = synthetic_rows(recipe)
    assert (wanted.modalities, wanted.labels, wanted.pairs) == (modalities, labels, pairs)


def test_synthetic_rows_of_an_unknown_data_set_hold_every_modality_and_every_source_that_a_reward_scores(recipe_file):
    sets = ['rewards=[{kind="choice",sources=["mine"]},{kind="math",sources=["sums"]},{kind="format"}]']
    wanted = synthetic_rows(load([recipe_file()], sets, ["rewards"]).recipe)
    assert wanted.labels == {"mine": "<answer>A</answer>", "sums": "4"}
    assert wanted.modalities == ("text", "image", "audio", "image+audio", "video")
    best = 'checkpoint.keep_best={metric="val/quiz/accuracy"}'
    recipe = load([recipe_file()], [best, "data.validation=v.parquet"]).recipe
    assert synthetic_rows(recipe).labels == {"quiz": "<answer>A</answer>"}


def test_modality_weights_say_which_modalities_are_written(recipe_file):
    sets = ["algorithm.kind=dpo", "data.batches=modality", "data.modality_weights={text=1,audio=2}"]
    recipe = load([recipe_file()], sets, ["algorithm", "rollout", "rewards"]).recipe
    assert synthetic_rows(recipe).modalities == ("text", "audio")


def test_synthetic_rows_are_rows_whose_media_decode(tmp_path):
    from omnitrain.data.media import load_audio, load_image, load_track, load_video
    from omnitrain.data.video import FrameSampling

    modalities = ("text", "image", "audio", "image+audio", "video")
    path = write_synthetic(
        tmp_path / "x.parquet", rows=2, modalities=modalities, labels={"a": "1", "b": "2"}, pairs=True
    )
    rows = list(RowFiles([path]))
    assert [row.modality for row in rows] == [modality for modality in modalities for _ in range(2)]
    assert {(row.source, row.answer) for row in rows} == {("a", "1"), ("b", "2")}
    assert all(row.chosen != row.rejected for row in rows) and len({row.id for row in rows}) == 10
    parts = {part.type: (part, row.root) for row in rows for message in row.messages for part in message.content}
    assert load_image(*parts["image"]).size == (64, 64)
    assert len(load_audio(*parts["audio"])) == 8000
    assert load_video(*parts["video"], FrameSampling()).frames.shape == (4, 64, 64, 3)
    assert len(load_track(*parts["video"])) >= 16000
