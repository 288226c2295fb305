"""What can be known of a recipe and its rows before a rank starts: fields without effect, sources and modalities."""

import pytest

from omnitrain.data.schema import write_rows
from omnitrain.errors import RecipeError
from omnitrain.recipe.loader import load
from omnitrain.recipe.plan import make_plan
from omnitrain.recipe.rows import summary_counts


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["data.batches=modality", "data.modality_weights={}"], "data.modality_weights is empty; remove it"),
        (["data.batches=modality", "data.modality_weights={Image=1}"], '"Image" is no modality; valid: text, image'),
        (["data.batches=modality", 'data.modality_weights={"audio+image"=1}'], '"audio+image" is no modality'),
        (
            ["data.batches=modality", 'data.modality_weights={image="1"}'],
            "data.modality_weights.image must be a number, not a string",
        ),
        (["data.video.max_pixels=1"], "data.video.min_pixels = 100352 is more than data.video.max_pixels = 1"),
        (["data.image.max_pixels=1"], "data.image.min_pixels = 3136 is more than data.image.max_pixels = 1"),
        (["validate.balance=modality", "validate.max_rows=3"], 'validate.balance = "modality" needs data.validation'),
        (['algorithm.correction={reject="token",reject_low=-1}'], "reject_low = -1.0 has no effect: k3 is never below 0"),
        (['algorithm.correction={reject="token",reject_high=-1}'], "reject_high = -1.0 rejects everything"),
        (["rewards[0].sources=[]"], "rewards[0].sources is empty; give it something, or remove it"),
        (['rewards+={kind="unified_reward",url="http://h/v1",model=""}'], "rewards[1].model is empty"),
    ],
)
def test_w1_a_value_that_could_only_be_a_mistake_is_refused_where_it_stands(recipe_file, sets, words):
    with pytest.raises(RecipeError) as caught:
        load([recipe_file()], sets)
    assert words in str(caught.value) and str(caught.value).startswith("--set ")


def test_a_rejection_by_k1_may_be_negative(recipe_file):
    load([recipe_file()], ['algorithm.correction={reject="token",reject_kl="k1",reject_low=-1.0,reject_high=-0.5}'])


def test_w1_a_template_without_the_answer_has_one_target_for_all_rows(recipe_file):
    sets = ['algorithm={kind="sft",template="yes"}']
    with pytest.raises(RecipeError, match="holds no {answer}"):
        load([recipe_file()], sets, ["algorithm", "rollout", "rewards"])


def test_a_lora_target_counts_once(recipe_file):
    loaded = load([recipe_file()], ['model.lora.targets=["q_proj","k_proj","q_proj"]'])
    assert loaded.recipe.model.lora.module_names() == ["q_proj", "k_proj"]


def test_w1_a_step_to_profile_after_the_end_is_refused(recipe_file):
    recipe = load([recipe_file()], ["profile.steps=[2,5]", "train.max_steps=5"]).recipe
    make_plan(recipe, 2)
    recipe = load([recipe_file()], ["profile.steps=[2,5]", "train.max_steps=4"], ["train.epochs"]).recipe
    with pytest.raises(RecipeError, match=r"profile.steps = \[2, 5\]: the run ends with step 4, before step 5"):
        make_plan(recipe, 2)


def rows(folder, source="avqa", texts=2, pictures=3):
    def row(index, *parts):
        return {
            "id": f"{source}-{index}", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}],
            "answer": "a", "source": source, "meta": {},
        }  # fmt: skip

    records = [row(i) for i in range(texts)] + [row(i, {"type": "image", "data": b"x"}) for i in range(9, 9 + pictures)]
    path = folder / f"{source}.parquet"
    write_rows(path, records, system_hash="x")
    return path


def planned(recipe_file, *sets):
    # The last two fix nothing here: an epoch of few rows.
    return make_plan(load([recipe_file()], [*sets, "train.prompts_per_step=2", "train.prompts_per_update=2"]).recipe, 2)


def test_w1_sources_are_compared_with_the_rows_before_a_rank_starts(recipe_file, tmp_path):
    path = rows(tmp_path)
    assert summary_counts([path], "sources") == {"avqa": 5}
    planned(recipe_file, f"data.train={path}", 'rewards[0].sources=["avqa"]')
    with pytest.raises(RecipeError, match=r'rewards\[0\].sources: no row has the source "aqva"; they have avqa'):
        planned(recipe_file, f"data.train={path}", 'rewards[0].sources=["aqva"]')
    both = f'data.train=["{path}", "{rows(tmp_path, "gsm8k")}"]'
    with pytest.raises(RecipeError, match='no reward scores the rows of source "gsm8k"'):
        planned(recipe_file, both, 'rewards[0].sources=["avqa"]')


def test_a_summary_of_other_rows_is_not_believed(tmp_path, recipe_file):
    path = rows(tmp_path)
    other = rows(tmp_path, "gsm8k", texts=9)
    path.write_bytes(other.read_bytes())
    assert summary_counts([path], "sources") is None
    planned(recipe_file, f"data.train={path}", 'rewards[0].sources=["gsm8k"]')


def test_c7_a_modality_of_too_few_rows_is_refused_before_a_rank_starts(recipe_file, tmp_path):
    path = rows(tmp_path)
    offline = [f"data.train={path}", 'algorithm={kind="sft"}', "data.batches=modality", "train.prompts_per_update=1"]

    def plan(*sets):
        return make_plan(load([recipe_file()], [*offline, *sets], ["algorithm", "rollout", "rewards"]).recipe, 1)

    plan("train.prompts_per_step=2")
    with pytest.raises(RecipeError, match='data.batches = "modality": text has 2 training rows, fewer than .* = 3'):
        plan("train.prompts_per_step=3")
    plan("train.prompts_per_step=3", "data.modality_weights={image=1}")
    with pytest.raises(RecipeError, match="data.modality_weights names audio, which no training row is of; there are image, text"):
        plan("train.prompts_per_step=1", "data.modality_weights={audio=1}")
