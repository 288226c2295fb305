"""The plan's arithmetic against counts made otherwise, and its verdicts."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnitrain.errors import DataError, ModelError, RecipeError
from omnitrain.models.qwen3_omni.spec import PUBLISHED, sizes
from omnitrain.recipe.loader import load
from omnitrain.recipe.plan import COMFORTABLE, make_plan, on_common_machines, total_steps
from omnitrain.recipe.rows import count_rows, modalities
from omnitrain.recipe.shipped import all_shipped


@pytest.fixture
def planned(recipe_file):
    """The plan of the example recipe with some fields set."""
    return lambda *sets, devices=4, memory=80.0, unsets=(): make_plan(
        load([recipe_file()], sets, unsets).recipe, devices, memory
    )


def test_x1_the_arithmetic_of_a_step(planned):
    batch = planned().batch
    assert batch.sequences_per_step == 128 * 16
    assert batch.updates_per_step == 8
    assert batch.sequences_per_update == 16 * 16
    assert batch.engines == 2
    assert batch.rows is None and batch.steps is None


def test_epochs_become_whole_steps_when_the_data_is_here(planned, tmp_path):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"id": [str(i) for i in range(4490)]}), tmp_path / "data" / "train.parquet")
    batch = planned().batch
    assert (batch.rows, batch.steps, batch.updates) == (4490, 350, 2800)
    assert planned("train.max_steps=10").batch.steps == 10
    assert planned("train.prompts_per_step=8192", "train.epochs=1").batch.steps == 1


def test_max_steps_alone_needs_no_data(recipe_file):
    recipe = load([recipe_file()], ["train.max_steps=7"], ["train.epochs"]).recipe
    assert total_steps(recipe, None) == 7


@given(groups=st.lists(st.integers(0, 40), max_size=4), columns=st.integers(1, 20), note=st.binary(max_size=300))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_counted_as_pyarrow_counts_them(tmp_path, groups, columns, note):
    names = [f"c{i}" for i in range(columns)]
    kinds = [pa.int64(), pa.list_(pa.struct([("a", pa.bool_()), ("b", pa.string())])), pa.float64(), pa.binary()]
    schema = pa.schema([(name, kinds[i % 4]) for i, name in enumerate(names)], metadata={b"note": note})
    path = tmp_path / "x.parquet"
    with pq.ParquetWriter(path, schema) as writer:
        for count in groups:
            writer.write_table(pa.Table.from_pylist([{}] * count, schema=schema))
    assert count_rows(path) == pq.ParquetFile(path).metadata.num_rows == sum(groups)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PAR1",
        b"not parquet at all",
        b"\x00" * 4 + b"\xff\xff\xff\x7fPAR1",
        b"\x15" * 20 + b"\x08\0\0\0PAR1",
        b"\xff" * 20 + b"\x08\0\0\0PAR1",
    ],
)
def test_a_file_that_is_not_parquet_is_a_data_error(tmp_path, content):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match="x.parquet"):
        count_rows(path)


def test_published_sizes_are_those_of_the_30b_a3b(planned):
    found = sizes(PUBLISHED[0])
    assert 30.4e9 < found.decoder < 30.6e9
    assert found.lora(32, ["q_proj", "k_proj", "v_proj", "o_proj"]) == 48 * 32 * 2 * ((2048 + 4096) + (2048 + 512))
    assert found.kv_bytes(2, 1) == 2 * 48 * 4 * 128 * 2
    assert found.kv_bytes(2, 8) == found.kv_bytes(2, 4)  # a head is not split


def tiny_config() -> dict:
    text = {
        "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 1024, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "max_position_embeddings": 640,
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "patch_size": 16, "out_hidden_size": 128}
    audio = {
        "d_model": 64, "encoder_layers": 2, "encoder_ffn_dim": 128, "downsample_hidden_size": 32, "num_mel_bins": 32,
        "output_dim": 128,
    }  # fmt: skip
    thinker = {"text_config": text, "vision_config": vision, "audio_config": audio}
    return {"model_type": "qwen3_omni_moe", "thinker_config": thinker}


def test_sizes_of_a_directory_are_those_of_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    # 2 layers, embeddings, head and final norm of a checkpoint written by transformers from this configuration.
    assert sizes(str(tmp_path)).decoder == 296576 + 131072 * 2 + 128


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda p: None, "has no config.json"),
        (lambda p: p.write_text("{"), "not a JSON object"),
        (lambda p: p.write_text("[]"), "not a JSON object"),
        (lambda p: p.write_text('{"model_type": "llama"}'), 'is a "llama" checkpoint'),
        (lambda p: p.write_text('{"model_type": "qwen3_omni_moe"}'), "'thinker_config' is missing"),
    ],
)
def test_a_directory_that_is_no_qwen3_omni_checkpoint_is_a_model_error(tmp_path, write, expected):
    write(tmp_path / "config.json")
    with pytest.raises(ModelError, match=expected):
        sizes(str(tmp_path))


def test_sizes_come_from_the_local_hub_cache_and_are_else_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert sizes("someone/finetune") is None
    snapshot = tmp_path / "models--someone--finetune" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(tiny_config()))
    assert sizes("someone/finetune").layers == 2


def test_an_unknown_model_gives_a_plan_without_memory(planned):
    plan = planned("model.path=someone/unknown")
    assert plan.verdict is None and plan.phases == ()
    assert any("memory is not planned" in warning for warning in plan.warnings)


def test_the_published_setting_fits_four_devices_of_80_gib_with_the_weights_awake(planned):
    plan = planned("train.max_tokens_per_device=20480")
    assert (plan.verdict, plan.sleep) == ("fits", "kv")
    parts = dict(plan.phases[-1].parts)
    assert parts["frozen weights, sharded"] == pytest.approx(14.2, abs=0.1)
    assert parts["engine weights"] == pytest.approx(28.5 + 2.2, abs=0.2)


def test_r6_rewards_have_a_line_of_their_own_in_the_memory(planned):
    (reward,) = [phase for phase in planned().phases if phase.name == "reward"]
    assert "rewards (on the CPU, or elsewhere)" in dict(reward.parts)


def test_auto_sleep_gives_up_the_weights_where_they_do_not_fit_beside_the_update(planned):
    plan = planned("rollout.gpu_memory_utilization=0.65", memory=64.0)
    assert plan.sleep == "weights"
    assert "engine weights" not in dict(plan.phases[-1].parts)


def test_an_engine_that_never_sleeps_keeps_its_cache_during_the_update(planned):
    off = planned("rollout.sleep=off").phases[-1].total
    assert off > planned("rollout.sleep=kv").phases[-1].total + 20


def test_u6_weights_that_do_not_fit_are_refused(planned):
    plan = planned("rollout.tensor_parallel=1", devices=1, memory=24.0)
    assert plan.verdict == "does not fit"
    assert plan.knob


@pytest.mark.parametrize(("devices", "memory"), [(2, 80.0), (4, 64.0), (4, 48.0)])
def test_the_knob_makes_it_fit(recipe_file, devices, memory):
    recipe = load([recipe_file()]).recipe
    knob = make_plan(recipe, devices, memory).knob
    words = knob.split()
    if words[-1] == "devices":
        again = make_plan(recipe, int(words[1]), memory)
    else:
        field, value = words[1], words[3]  # "set FIELD = VALUE" or "lower FIELD to VALUE"
        again = make_plan(load([recipe_file()], [f"{field}={value}"]).recipe, devices, memory)
    assert again.verdict == "fits"


def test_what_needs_more_memory_is_planned_to_need_more(planned):
    base = planned().phases[-1].total
    assert planned("train.max_tokens_per_device=32768").phases[-1].total > base
    assert planned("train.gradient_checkpointing=false").phases[-1].total > base
    assert planned("model.dtype=float32", "rollout.sleep=kv").phases[-1].total > base
    assert planned(unsets=["model.lora"]).phases[-1].total > base
    assert planned(devices=8).phases[-1].total < base
    assert planned(unsets=["model.lora"]).disk_gib > 100 > planned().disk_gib


@pytest.mark.parametrize("memory", [60.0, 70.0, 74.0, 80.0])
def test_the_verdict_follows_the_largest_phase(planned, memory):
    plan = planned(memory=memory)
    share = max(phase.total for phase in plan.phases) / memory
    assert plan.verdict == ("does not fit" if share > 1 else "tight" if share > COMFORTABLE else "fits")
    assert (plan.knob is None) == (plan.verdict == "fits")


def test_a_sequence_longer_than_a_micro_batch_is_refused_with_the_three_fields(planned):
    with pytest.raises(RecipeError) as caught:
        planned("train.max_tokens_per_device=3071")
    text = str(caught.value)
    assert "data.max_prompt_tokens + rollout.max_new_tokens = 2048 + 1024 = 3072" in text
    assert "train.max_tokens_per_device = 3071" in text and caught.value.exit_code == 2
    assert planned("train.max_tokens_per_device=3072")


def test_a_prompt_longer_than_a_micro_batch_is_noted_for_sft_in_its_own_fields(recipe_file):
    sets = ["algorithm.kind=sft", "train.max_tokens_per_device=2047"]
    recipe = load([recipe_file()], sets, ["algorithm", "rollout", "rewards"]).recipe
    (note,) = [text for text in make_plan(recipe, 4, 80.0).warnings if "max_tokens_per_device" in text]
    assert note.startswith("data.max_prompt_tokens = 2048 is more than") and "rollout" not in note


def test_tensor_parallel_on_one_device_suggests_planning_for_others(planned):
    with pytest.raises(RecipeError, match="or plan another machine by `--devices 4 --memory 80`"):
        planned(devices=1)


def test_a_plan_of_sft_has_one_phase_and_no_engine(recipe_file):
    recipe = load([recipe_file()], ["algorithm.kind=sft"], ["algorithm", "rollout", "rewards"]).recipe
    plan = make_plan(recipe, 4, 80.0)
    assert [phase.name for phase in plan.phases] == ["train"]
    assert (plan.batch.engines, plan.sleep, plan.kv_tokens) == (0, None, None)


def test_a_plan_with_the_trainer_as_engine_has_no_engine_weights(recipe_file):
    recipe = load([recipe_file("tensor_parallel = 2", 'engine = "trainer"')]).recipe
    plan = make_plan(recipe, 3, 80.0)
    assert all("engine weights" not in dict(phase.parts) for phase in plan.phases)


def test_no_devices_is_an_error(recipe_file):
    with pytest.raises(RecipeError, match="--devices 0"):
        make_plan(load([recipe_file()]).recipe, 0)


def test_planning_leaves_no_files_behind(planned, tmp_path):
    planned()
    assert [path.name for path in Path(tmp_path).iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize(
    ("sets", "fields"),
    [
        (["data.max_prompt_tokens=600", "rollout.max_new_tokens=41"], "+ rollout.max_new_tokens = 600 + 41 = 641"),
        (
            ["data.max_prompt_tokens=600", "rollout.max_new_tokens=8", "validate.max_new_tokens=50"],
            "+ validate.max_new_tokens = 600 + 50 = 650",
        ),
    ],
)
def test_sequences_longer_than_the_models_positions_are_refused(recipe_file, tmp_path, sets, fields):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    recipe = load([recipe_file()], [f"model.path={tmp_path}", *sets]).recipe
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe, 8)
    assert f"data.max_prompt_tokens {fields} is more than the model's 640 positions" in str(caught.value)
    fitting = load([recipe_file()], [f"model.path={tmp_path}", *sets, "data.max_prompt_tokens=590"]).recipe
    assert make_plan(fitting, 8).sizes.max_positions == 640


def dpo(recipe_file, *sets):
    return load([recipe_file()], ["algorithm.kind=dpo", *sets], ["algorithm", "rollout", "rewards"]).recipe


def test_dynamic_sampling_draws_again_and_says_how_often_at_most(recipe_file):
    def draws(*sets):
        return make_plan(load([recipe_file()], ["algorithm.kind=dapo", *sets], ["algorithm"]).recipe, 4).batch.most_draws

    assert (draws(), draws("algorithm.max_generation_batches=3"), draws("algorithm.dynamic_sampling=false")) == (10, 3, 1)
    assert make_plan(load([recipe_file()]).recipe, 4).batch.most_draws == 1


def test_dpo_counts_pairs_and_has_the_update_alone(recipe_file):
    plan = make_plan(dpo(recipe_file), 4, 80.0)
    assert (plan.batch.noun, plan.batch.group_size, plan.batch.engines) == ("pair", 1, 0)
    assert [phase.name for phase in plan.phases] == ["train"]


def test_a_pair_longer_than_a_micro_batch_is_noted_with_its_fields(recipe_file):
    sets = ["data.max_response_tokens=1000", "train.max_tokens_per_device=6000"]
    (note,) = [text for text in make_plan(dpo(recipe_file, *sets), 4).warnings if "max_tokens_per_device" in text]
    assert note.startswith("2 x (data.max_prompt_tokens + data.max_response_tokens) = 6096 is more than")
    sets[1] = "train.max_tokens_per_device=6096"
    assert not [text for text in make_plan(dpo(recipe_file, *sets), 4).warnings if "max_tokens_per_device" in text]


def test_rows_of_several_files_are_counted_together_or_not_at_all(recipe_file, tmp_path):
    recipe = load([recipe_file()], ['data.train=["a.parquet","b.parquet"]']).recipe
    pq.write_table(pa.table({"id": ["x"] * 1000}), tmp_path / "a.parquet")
    plan = make_plan(recipe, 4)
    assert plan.batch.rows is None
    assert [text for text in plan.warnings if "does not exist" in text] == ["data.train does not exist here: b.parquet"]
    pq.write_table(pa.table({"id": ["x"] * 280}), tmp_path / "b.parquet")
    assert make_plan(recipe, 4).batch.rows == 1280


def test_an_adapter_on_the_experts_counts_every_expert(planned):
    found = sizes(PUBLISHED[0])
    # gate_up 2048 -> 1536 and down 768 -> 2048, rank 32, of 128 experts in 48 layers
    assert found.lora(32, ["gate_up_proj"]) == 48 * 128 * 32 * (2048 + 1536)
    assert found.lora(32, ["down_proj"]) == 48 * 128 * 32 * (768 + 2048)
    attention, experts = planned(), planned('model.lora.targets="attention+experts"')
    more = found.lora(32, ["gate_up_proj", "down_proj"])
    gained = dict(experts.phases[-1].parts)["gradients"] - dict(attention.phases[-1].parts)["gradients"]
    assert gained == pytest.approx(more * 4 / 4 / 2**30)
    assert experts.disk_gib > attention.disk_gib + 10
    assert dict(experts.phases[0].parts)["one gathered layer"] > dict(attention.phases[0].parts)["one gathered layer"]


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (["train.ema.decay=0.9"], "moving average"),
        (["model.adapter=runs/dpo"], "starting adapter (reference)"),
    ],
)
def test_a_second_copy_of_what_is_trained_is_counted_in_memory_and_on_disk(planned, sets, part):
    base, plan = planned(), planned(*sets)
    extra = sizes(PUBLISHED[0]).lora(32, ["q_proj", "k_proj", "v_proj", "o_proj"]) * 4 / 2**30
    assert all(dict(phase.parts)[part] == pytest.approx(extra / 4) for phase in plan.phases)
    assert part not in dict(base.phases[0].parts)
    assert plan.disk_gib >= base.disk_gib + extra


def test_media_bounds_become_tokens_of_a_prompt(recipe_file):
    recipe = load([recipe_file()]).recipe
    from omnitrain.recipe.plan import media_tokens

    # 602112 pixels are 588 tokens of 32 x 32; two frames share theirs.
    assert media_tokens(recipe, sizes(PUBLISHED[0])) == {"picture": 588, "video": 4 * 588}


def test_media_that_fill_a_prompt_are_noted_where_the_rows_hold_them(recipe_file, tmp_path):
    recipe = load([recipe_file()], ["data.train=rows.parquet", "data.video.max_frames=10"]).recipe
    by_default = load([recipe_file()], ["data.train=rows.parquet"]).recipe
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "rows.parquet")
    noted = lambda: [text for text in make_plan(recipe, 4).warnings if "a video may take 2940 tokens" in text]  # noqa: E731
    assert not noted()
    (tmp_path / "rows.summary.json").write_text(json.dumps({"modalities": {"video": 3, "image+audio": 2, "text": 1}}))
    assert modalities([tmp_path / "rows.parquet"]) == {"video", "image", "audio"}
    (note,) = noted()
    assert not [text for text in make_plan(by_default, 4).warnings if "may take" in text]
    assert "data.max_prompt_tokens = 2048: lower data.video.max_pixels or max_frames" in note
    (tmp_path / "rows.summary.json").write_text("[")
    assert modalities([tmp_path / "rows.parquet"]) == set()


def test_a_response_that_the_model_has_no_positions_for_is_refused_offline_too(recipe_file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(RecipeError, match=r"data.max_prompt_tokens \+ data.max_response_tokens = 600 \+ 41 = 641"):
        make_plan(
            dpo(
                recipe_file,
                f"model.path={tmp_path}",
                "data.max_prompt_tokens=600",
                "data.max_response_tokens=41",
            ),
            1,
        )


SHIPPED = [item for item in all_shipped() if item.name.startswith("qwen3_omni/")]


@pytest.mark.parametrize("item", SHIPPED, ids=lambda item: item.path.stem)
def test_every_shipped_recipe_is_planned_on_common_machines_and_fits_the_one_it_names(item):
    recipe = load([item.path]).recipe
    plans = {(plan.devices, plan.memory_gib): (plan, lowered) for plan, lowered in on_common_machines(recipe)}
    assert set(plans) == {(devices, memory) for devices in (1, 4, 8) for memory in (80.0, 141.0)}
    for (devices, memory), (plan, lowered) in plans.items():
        assert plan.verdict in ("fits", "tight", "does not fit") and plan.phases and plan.disk_gib > 0
        parallel = getattr(recipe.rollout, "tensor_parallel", 1)
        assert lowered == (1 if devices % parallel else None)
        smaller = plans[devices, 80.0][0]
        assert not (smaller.verdict == "fits" and plan.verdict == "does not fit" and memory > 80)
    devices, memory = item.notes["accelerators"].removesuffix(" GB").split(" x ")
    named = make_plan(recipe, int(devices), float(memory))
    assert named.verdict == "fits", named.knob


def test_the_shipped_recipes_have_the_published_values():
    recipes = {item.path.stem: load([item.path]).recipe for item in SHIPPED}
    assert set(recipes) == {
        *("gspo_gsm8k", "gspo_mmk12", "gspo_avqa", "gspo_nextqa", "gspo_nextqa_full"),
        *("dapo_avqa", "dapo_avqa_full_method", "dpo_omni_preference"),
    }
    for name, recipe in recipes.items():
        train = recipe.train
        if recipe.algorithm.online:
            assert (train.prompts_per_step, train.prompts_per_update, recipe.rollout.group_size) == (128, 16, 16), name
            assert train.learning_rate == (1e-6 if name == "gspo_nextqa_full" else 3e-6)
            assert (recipe.validate_.every, recipe.checkpoint.every, train.epochs) == (10, 50, 10)
            assert recipe.algorithm.kl == 0
        if recipe.model.lora is not None:
            assert (recipe.model.lora.rank, recipe.model.lora.alpha) == (32, 64)
    gspo, phase_1, whole = recipes["gspo_avqa"], recipes["dapo_avqa"], recipes["dapo_avqa_full_method"]
    assert (gspo.algorithm.clip_low, gspo.algorithm.clip_high) == (3e-4, 4e-4)
    assert (phase_1.algorithm.clip_low, phase_1.algorithm.clip_high, phase_1.algorithm.aggregation) == (0.2, 0.28, "token_mean")
    assert not phase_1.algorithm.dynamic_sampling and not phase_1.algorithm.overlong_buffer
    assert whole.algorithm.dynamic_sampling and whole.algorithm.overlong_buffer
    # They compare: nothing but the algorithm differs.
    for other in (phase_1, whole):
        ours, theirs = gspo.plain(), other.plain()
        assert {key for key in ours if ours[key] != theirs[key]} == {"name", "algorithm"}
    pairs = recipes["dpo_omni_preference"]
    assert (pairs.algorithm.beta, pairs.algorithm.label_smoothing, pairs.algorithm.loss) == (0.1, 0.1, "sigmoid")
    assert pairs.model.lora.targets == "attention+experts" and pairs.data.batches == "modality"
    assert (pairs.validate_.balance, pairs.validate_.max_rows, pairs.train.max_steps) == ("modality", 96, 200)
    assert pairs.train.warmup_updates == 0.03 * 200 * 4
