"""Bad recipes: each message names the place and the fix."""

import re

import pytest

from omnitrain.errors import DataError, RecipeError
from omnitrain.recipe.fields import all_fields
from omnitrain.recipe.loader import check_files, load
from omnitrain.recipe.plan import make_plan


def message(*args, **kwargs) -> str:
    with pytest.raises(RecipeError) as caught:
        load(*args, **kwargs)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def complaint(recipe_file):
    """The message for the example recipe with a piece of text replaced."""
    return lambda old, new: message([recipe_file(old, new)])


def test_u1_an_unknown_flag_field_names_the_flag_and_the_field_that_was_meant(recipe_file):
    text = message([recipe_file()], ["train.lrr=1"])
    assert text == "--set train.lrr=1: unknown field train.lrr; did you mean train.learning_rate?"


def test_u1_an_unknown_file_field_has_position_line_and_caret(complaint):
    text = complaint("learning_rate = 3e-6", "lrr = 3e-6")
    assert text == (
        "recipe.toml:25:1 unknown field train.lrr; did you mean train.learning_rate?\n   25 | lrr = 3e-6\n      | ^^^"
    )


@pytest.mark.parametrize(
    ("old", "new", "place", "field"),
    [
        ('name = "example"', 'name = "example"\nnope = 1', "2:1", "nope"),
        ("[data]", "[data]\nnope = 1", "10:1", "data.nope"),
        ("alpha = 64", "alpha = 64, nope = 1", "7:33", "model.lora.nope"),
        ("group_size = 16", "group_size = 16\nengine_options = { nope = 1 }", "17:1", "rollout.engine_options"),
        ('kind = "choice"', 'kind = "choice"\nnope = 1', "21:1", "rewards[0].nope"),
        ("epochs = 10", "epochs = 10\n[trackers.wandb]\nproject = 'x'\nnope = 1", "29:1", "trackers.wandb.nope"),
        ("epochs = 10", "epochs = 10\n[nope.deep]\nx = 1", "27:2", "[nope]"),
    ],
)
def test_u2_an_unknown_key_at_any_depth_is_an_error(complaint, old, new, place, field):
    text = complaint(old, new)
    assert text.startswith(f"recipe.toml:{place} unknown ") and field in text.splitlines()[0]


@pytest.mark.parametrize(
    ("new", "suggestion"),
    [
        ("lr = 3e-6", "train.learning_rate"),
        ("learning-rate = 3e-6", "train.learning_rate"),
        ("learningrate = 3e-6", "train.learning_rate"),
        ("learning_rate = 3e-6\ngroup_size = 3", "rollout.group_size"),
        ("learning_rate = 3e-6\nmax_grad_norm = 1.0", "train.grad_clip"),
        ("learning_rate = 3e-6\nseed = 1", "seed"),
    ],
)
def test_suggestions_know_abbreviations_other_tables_and_other_tools(complaint, new, suggestion):
    text = complaint("learning_rate = 3e-6", new)
    assert f"did you mean {suggestion}?" in text
    assert "missing" not in text


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seed = 42", 'seed = "42"', "2:8 seed must be an integer, not a string"),
        ("seed = 42", "seed = 42.0", "2:8 seed must be an integer, not a float (42.0)"),
        ("seed = 42", "seed = true", "2:8 seed must be an integer, not a boolean (true)"),
        ("seed = 42", "seed = [1]", "2:8 seed must be an integer, not a list ([1])"),
        ("seed = 42", "seed = -1", "2:8 seed = -1 must be at least 0"),
        ("3e-6", '"3e-6"', "25:17 train.learning_rate must be a number, not a string"),
        ("3e-6", "nan", "25:17 train.learning_rate = nan must be a finite number"),
        ("3e-6", "2024-01-01", "25:17 train.learning_rate is a date"),
        ('train = "data/train.parquet"', "train = 3", "10:9 data.train must be a path (a string) or a list of paths, not an integer"),
        ("rank = 32", "rank = 0", "7:17 model.lora.rank = 0 must be at least 1"),
        ("alpha = 64", "alpha = 64, targets = [1]", "7:44 model.lora.targets[0] must be a string"),
        ("[train]", "[train]\nbetas = [0.9]", "23:1 train.betas = [0.9] must be [a number, a number]"),
        ("[train]", "[train]\nbetas = [0.9, 1.5]", "23:1 train.betas = [0.9, 1.5]: each must be at least 0 and below 1"),
        (
            "[[rewards]]",
            '[[rewards]]\non_failure = "drop"',
            '20:1 on_failure = "drop" is not "fail", "skip" or "value:NUMBER"',
        ),
        ("[[rewards]]", '[[rewards]]\non_failure = "value:e"', '20:1 on_failure = "value:e" needs a finite number'),
        ("[train]", '[train]\nschedule = "cosin"', '23:12 train.schedule = "cosin" is not valid'),
        ('name = "example"', 'name = "a/b"', '1:8 name = "a/b" is not a name of letters, digits'),
        ("[[rewards]]", "[rewards]", "19:2 rewards must be a list of tables, not a table"),
        ("[data]", "[data.train]", "9:2 data must be"),
    ],
)
def test_a_wrong_type_or_value_is_shown_at_the_value(complaint, old, new, expected):
    text = complaint(old, new)
    if new == "[data.train]":  # the table swallowed the field
        assert "data.train must be a path (a string) or a list of paths, not a table" in text
    else:
        assert text.startswith(f"recipe.toml:{expected}"), text


@pytest.mark.parametrize("flag", ["rollout=3", "train=3", "model=[]", "rewards=[3]", "data='x'"])
def test_a_value_for_a_table_is_an_error_and_not_a_crash(recipe_file, flag):
    assert "must be a table" in message([recipe_file()], [flag])


def test_messages_say_forms_in_words_and_not_as_patterns(complaint):
    text = complaint('kind = "choice"', 'kind = "python"\nfunction = "score"')
    assert 'rewards[0].function = "score" is not of the form "module:function"' in text and "\\w" not in text


def test_a_table_for_a_list_of_tables_says_how_to_write_one(complaint):
    assert complaint("[[rewards]]", "[rewards]").splitlines()[0].endswith("; write [[rewards]]")


def test_a_list_item_after_a_dot_is_shown_in_brackets(recipe_file):
    assert message([recipe_file()], ["rewards.0.weight=2"]).endswith("name an item, as rewards[0].weight")
    assert message([recipe_file()], ["rewards.weight=2"]).endswith("name an item, as rewards[0].weight")


def test_a_shipped_recipe_that_is_no_file_here_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny/gspo_quickstart", "gspo_quickstart.toml", "recipes/tiny/gspo_quickstart.toml"):
        assert message([name]).endswith("it ships with omnitrain: `omnitrain recipes copy tiny/gspo_quickstart`")


@pytest.mark.parametrize(
    "given",
    [
        "validate.temperature=0.5",
        "validate.top_p=0.5",
        "validate.top_k=5",
        "validate.max_new_tokens=4",
        "samples.every=1",
        "samples.groups=2",
    ],
)
def test_u2_a_field_that_an_offline_algorithm_never_reads_is_an_error(recipe_file, given):
    offline = ["algorithm", "rollout", "rewards"]
    text = message([recipe_file()], ["algorithm.kind=sft", given], offline)
    assert f'{given.split("=")[0]} has no effect with algorithm.kind = "sft"' in text
    load([recipe_file()], ["algorithm.kind=sft", "validate.every=2"], offline)
    load([recipe_file()], [given])


def test_u2_a_gate_that_an_offline_algorithm_does_not_have_cannot_be_skipped(recipe_file):
    offline = ["algorithm", "rollout", "rewards"]
    text = message([recipe_file()], ["algorithm.kind=sft", 'gates.skip=["g10","g6","g5"]'], offline)
    assert 'gates.skip: g6, g5 has no effect with algorithm.kind = "sft", which has g3, g10; remove it' in text
    assert load([recipe_file()], ["algorithm.kind=dpo", 'gates.skip=["g5"]'], offline).recipe.gates.skip == ["g5"]


def test_keeping_the_best_by_a_validation_metric_needs_validation_rows(recipe_file):
    best = 'checkpoint.keep_best={metric="val/a/accuracy"}'
    assert "needs data.validation" in message([recipe_file()], [best])
    load([recipe_file()], [best, "data.validation=v.parquet"])


def test_a_wrong_kind_lists_the_valid_ones(complaint):
    assert complaint('"gspo"', '"grpo"').startswith(
        'recipe.toml:13:8 algorithm.kind = "grpo" is not valid; valid: "gspo", "dapo", "dpo", "sft"; did you mean "gspo"?'
    )
    text = complaint('"choice"', '"choise"')
    assert 'valid: "choice", "math", ' in text and 'did you mean "choice"?' in text
    assert complaint('family = "qwen3_omni"', 'family = "sd35"').startswith(
        'recipe.toml:5:10 model.family = "sd35" is not valid; valid: "qwen3_omni"'
    )
    assert 'rollout.engine = "vlm" is not valid' in complaint("group_size = 16", 'engine = "vlm"')


def test_a_wrong_family_is_reported_without_its_own_fields(complaint):
    text = complaint('family = "qwen3_omni"', 'family = "sd35"\nvae = "x"')
    assert "vae" not in text


def test_a_missing_kind_names_the_choices(complaint):
    assert complaint('kind = "choice"', "weight = 1.0").startswith(
        "recipe.toml:19:3 missing field rewards[0].kind; valid:"
    )


def test_a_field_of_another_kind_says_whose_it_is(complaint):
    text = complaint('kind = "gspo"', 'kind = "gspo"\ntemplate = "{answer}"')
    assert text.startswith(
        'recipe.toml:14:1 algorithm.template has no effect with algorithm.kind = "gspo"; '
        'it belongs to algorithm.kind = "sft"'
    )
    text = complaint("group_size = 16", 'group_size = 16\nengine = "trainer"')
    assert 'rollout.tensor_parallel has no effect with rollout.engine = "trainer"' in text
    text = complaint('kind = "choice"', 'kind = "choice"\nfunction = "a:b"')
    assert 'it belongs to rewards.kind = "python"' in text


def test_an_option_of_another_family_is_refused(complaint):
    text = complaint("group_size = 16", "group_size = 16\nsteps = 10\nguidance = 4.5")
    assert "unknown field rollout.steps" in text and "unknown field rollout.guidance" in text


def test_missing_fields_and_tables_are_named(complaint):
    assert complaint('train = "data/train.parquet"', "").startswith(
        "recipe.toml:9:2 missing field data.train (a path (a string) or a list of paths): Parquet file of training rows, or a list"
    )
    text = complaint('[data]\ntrain = "data/train.parquet"\n', "")
    assert text == "recipe.toml: missing table [data]; it needs data.train"


def test_several_problems_are_all_listed_in_the_order_of_the_file(complaint):
    text = complaint("seed = 42", 'seed = "x"\nx = 1\n[trackers]\nwandb = { nope = 1 }')
    heads = re.findall(r"^recipe\.toml:(\d+)", text, re.M)
    assert heads == sorted(heads, key=int) and len(heads) == 4
    assert text.endswith("4 problems in the recipe")


def test_group_size_1_with_a_group_relative_algorithm_is_refused(complaint):
    text = complaint("group_size = 16", "group_size = 1")
    assert text.startswith('recipe.toml:16:1 rollout.group_size = 1 with algorithm.kind = "gspo"')
    assert "set rollout.group_size to 2 or more" in text and "   16 | group_size = 1" in text


def test_x1_indivisible_prompts_name_both_fields_and_the_nearest_valid_values(complaint):
    text = complaint("prompts_per_update = 16", "prompts_per_update = 48")
    assert text.startswith(
        "recipe.toml:23:1 train.prompts_per_step = 128 is not divisible by train.prompts_per_update = 48; "
        "nearest: prompts_per_step = 96 or 144"
    )


def test_a_cross_field_error_from_a_flag_points_at_the_flag(recipe_file):
    assert message([recipe_file()], ["rollout.group_size=1"]).startswith(
        "--set rollout.group_size=1: rollout.group_size = 1"
    )


def test_no_end_of_the_run_is_an_error(complaint):
    assert "train.max_steps and train.epochs are both missing; set one" in complaint("epochs = 10", "")


def test_online_tables_with_sft_are_refused(recipe_file):
    text = message([recipe_file()], ["algorithm.kind=sft"])
    assert text.startswith('recipe.toml:15:2 [rollout] has no effect with algorithm.kind = "sft"; remove it')


def test_kl_without_an_adapter_is_refused(recipe_file):
    text = message([recipe_file()], ["algorithm.kl=0.1"], ["model.lora"])
    assert text.startswith("--set algorithm.kl=0.1: algorithm.kl = 0.1 without model.lora")


@pytest.mark.parametrize("devices", [1, 3, 5])
def test_x1_tensor_parallel_that_does_not_divide_the_devices_names_both(recipe_file, devices):
    loaded = load([recipe_file()])
    with pytest.raises(RecipeError) as caught:
        make_plan(loaded.recipe, devices)
    text = loaded.locate(str(caught.value))
    assert text.startswith("recipe.toml:17:1 rollout.tensor_parallel = 2 does not divide the number of devices, ")
    assert f", {devices}; use --devices" in text and "set rollout.tensor_parallel to 1" in text


def test_tensor_parallel_that_does_not_divide_the_heads_is_refused(recipe_file):
    loaded = load([recipe_file()], ["rollout.tensor_parallel=3"])
    with pytest.raises(RecipeError, match="does not divide the model's 32 attention heads"):
        make_plan(loaded.recipe, 3)


def test_w1_lora_targets_that_match_nothing_are_refused_before_a_run(recipe_file):
    loaded = load([recipe_file()], ['model.lora.targets=["q_proj", "query"]'])
    with pytest.raises(RecipeError, match=r'matches no module: query; .* q_proj, k_proj, v_proj, o_proj.* "attention"'):
        make_plan(loaded.recipe, 2)


def test_a_missing_recipe_suggests_a_near_name(recipe_file):
    recipe_file(name="gspo_gsm8k.toml")
    assert message(["gspo_gsm8.toml"]) == "no recipe file gspo_gsm8.toml; did you mean gspo_gsm8k.toml?"
    assert "`omnitrain recipes`" in message(["other.toml"])


def test_a_directory_for_a_recipe_lists_what_is_in_it(recipe_file, tmp_path):
    recipe_file()
    assert message([tmp_path]) == f"{tmp_path} is a directory, not a recipe; in it: recipe.toml"


def test_a_syntax_error_has_its_place_and_a_caret(complaint):
    text = complaint("seed = 42", "seed = = 42")
    assert text.startswith("recipe.toml:2:8 not TOML: ")
    assert text.endswith("    2 | seed = = 42\n      |        ^")


@pytest.mark.parametrize("content", [b"", b'name = "x', b"a = [", b"\xff\xfe", b"[", b"\x00", "é = 1".encode()])
def test_broken_files_are_recipe_errors(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    assert "broken.toml" in message([path])


def test_a_byte_order_mark_and_windows_line_ends_are_read(recipe_file):
    path = recipe_file()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    loaded = load([path])
    assert loaded.recipe.seed == 42 and loaded.origins["train.epochs"] == "recipe.toml:26"


def test_control_characters_of_a_file_do_not_reach_the_terminal(complaint):
    assert "\x1b" not in complaint("seed = 42", "seed = '\x9b31m'")


def test_a_missing_data_file_or_a_directory_for_one_is_a_data_error_with_its_place(recipe_file, tmp_path):
    loaded = load([recipe_file()])
    with pytest.raises(DataError, match=r"^recipe\.toml:10:1 data\.train does not exist: data/train\.parquet"):
        check_files(loaded)
    check_files(loaded, missing_ok=True)
    (tmp_path / "data" / "train.parquet").mkdir(parents=True)
    with pytest.raises(DataError, match=r"^recipe\.toml:10:1 data\.train is a directory"):
        check_files(loaded, missing_ok=True)


VALUES = ["3", "-1", "1.5", "nan", "true", "'x'", "''", "[]", "[1]", "['x']", "[[]]", "{}", "{ a = 1 }", "[{}]", "[3]"]
PATHS = sorted({field.path.replace("[]", "[0]") for field in all_fields()}) + [
    "rewards[0]",
    "nope",
    "nope.deep",
    "train.nope",
]


@pytest.mark.parametrize("path", PATHS)
def test_any_value_anywhere_is_taken_or_is_a_recipe_error_that_names_the_flag(recipe_file, path):
    file = recipe_file()
    for value in VALUES:
        flag = f"{path}={value}"
        try:
            load([file], [flag])
        except RecipeError as error:
            # A valid value can be at odds with another field, and the message may then stand at that one.
            assert f"--set {flag}: " in str(error) or str(error).startswith("recipe.toml"), str(error)


@pytest.mark.parametrize(
    ("table", "message_"),
    [
        ("profile={steps=[0]}", "profile.steps = [0]: steps are counted from 1"),
        ("profile={steps=[]}", "[profile] has no effect with profile.steps = []; name a step"),
        ("profile={steps=[],memory=true,nvtx=true}", "profile.memory = true has no effect with profile.steps = []"),
    ],
)
def test_a_profile_without_effect_is_refused(recipe_file, table, message_):
    with pytest.raises(RecipeError) as caught:
        load([recipe_file()], [table])
    assert message_ in str(caught.value)
    assert load([recipe_file()], ["profile={steps=[],nvtx=true}"]).recipe.profile.nvtx
