from omnitrain.data.media import load_audio, load_image
from omnitrain.data.schema import RowFile
from omnitrain.evaluation.agreement import MODALITIES, agreement_recipe, table, write_prompts
from omnitrain.recipe.loader import validated

RECIPE = validated(
    {
        "name": "r",
        "model": {"family": "qwen3_omni", "path": "nowhere", "dtype": "bfloat16"},
        "data": {"train": "a.parquet", "validation": "b.parquet"},
        "algorithm": {"kind": "gspo"},
        "rollout": {"group_size": 2},
        "rewards": [{"kind": "python", "function": "m:f"}],
        "train": {"prompts_per_step": 2, "learning_rate": 1e-3, "max_steps": 1},
    }
)


def test_prompts_of_every_modality_are_written_and_decode(tmp_path):
    rows = list(RowFile(write_prompts(tmp_path / "p.parquet", per_modality=3)))
    assert [row.source for row in rows] == [m for m in MODALITIES for _ in range(3)]
    sizes, lengths = set(), set()
    for row in rows:
        for part in row.messages[0].content:
            if part.type == "image":
                sizes.add(load_image(part, row.root).size)
            if part.type == "audio":
                lengths.add(len(load_audio(part, row.root)))
    assert len(sizes) == 3 and len(lengths) == 3, "prompts of one size would hide a wrong position"


def test_the_prompts_are_the_same_every_time(tmp_path):
    one, two = write_prompts(tmp_path / "1.parquet"), write_prompts(tmp_path / "2.parquet")
    assert [row.messages for row in RowFile(one)] == [row.messages for row in RowFile(two)]


def test_the_measured_recipe_keeps_model_and_rollout_and_needs_no_reward_or_data(tmp_path):
    recipe = agreement_recipe(RECIPE, tmp_path, dtype="float32")
    assert recipe.model.dtype == "float32" and recipe.model.path == "nowhere"
    assert recipe.rollout == RECIPE.rollout
    assert recipe.data.validation is None and len(RowFile(recipe.data.train)) == 2 * len(MODALITIES)
    assert [reward.kind for reward in recipe.rewards] == ["choice"]
    assert agreement_recipe(RECIPE, tmp_path).model.dtype == "bfloat16"


def test_the_table_has_a_line_per_dtype_and_modality():
    numbers = dict(pearson=0.9999999, abs_mean=1e-6, abs_max=1e-5, k3=0.0, log_ppl_diff=-2e-7)
    lines = table([dict(dtype="float32", modality=m, tokens=12, **numbers) for m in MODALITIES]).splitlines()
    assert len(lines) == 2 + len(MODALITIES)
    assert lines[2].split() == ["float32", "text", "12", "0.9999999", "1.00e-06", "1.00e-05", "0.00e+00", "-2.00e-07"]
