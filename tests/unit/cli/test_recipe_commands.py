"""plan, recipes, schema and explain as a user calls them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import typer
from typer.testing import CliRunner

from omnitrain.cli import explain, plan, recipes, schema
from omnitrain.errors import DataError, OmnitrainError, RecipeError, UsageError
from omnitrain.recipe.shipped import all_shipped

AVQA = next(item.path for item in all_shipped() if item.name == "qwen3_omni/gspo_avqa")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls the commands in an empty directory; errors come through, as the main command prints them."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    for module in (plan, recipes, schema, explain):
        module.register(app)

    def call(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if isinstance(result.exception, OmnitrainError):
            raise result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return call


def test_plan_shows_values_with_origins_arithmetic_memory_and_verdict(run):
    result = run(
        "plan", AVQA, "--devices", "4", "--memory", "80", "--set", "train.max_steps=20", "--set", "validate.every=5"
    )
    text = result.output
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["validate.every"] == ["validate.every", "5", "--set"]
    assert rows["rollout.temperature"] == ["rollout.temperature", "1.0", "default"]
    assert rows["train.prompts_per_step"][2].startswith("gspo_avqa.toml:")
    assert "a step: 128 prompts x 16 responses = 2048 sequences" in text
    assert "updates a step: 8, each of 16 prompts x 16 = 256 sequences" in text
    assert "sync  rollout  reward  train" in text
    assert "rollout.sleep = auto (auto -> kv)" in text
    assert "fits: " in text and "host memory per device" in text


def test_plan_exits_1_and_names_the_knob_when_it_does_not_fit(run):
    result = run("plan", AVQA, "--devices", "2", "--memory", "80")
    assert result.exit_code == 1
    assert "does not fit: " in result.output and "to make it fit: lower rollout.gpu_memory_utilization" in result.output


def test_plan_puts_a_position_on_errors_found_after_loading(run):
    with pytest.raises(RecipeError, match=r"gspo_avqa\.toml:\d+:1 rollout\.tensor_parallel = 2 does not divide .* 3;"):
        run("plan", AVQA, "--devices", "3")


def test_plan_refuses_a_directory_for_a_data_file_and_notes_a_missing_one(run, tmp_path):
    assert "note: data.train does not exist here" in run("plan", AVQA, "--devices", "2").output
    with pytest.raises(DataError, match="data.train is a directory"):
        run("plan", AVQA, "--devices", "2", "--set", f"data.train={tmp_path}")


def test_plan_writes_nothing(run, tmp_path):
    run("plan", AVQA, "--devices", "4", "--memory", "80")
    assert list(tmp_path.iterdir()) == []


def test_plan_ends_with_common_machines_unless_one_is_given(run):
    result = run("plan", AVQA)
    assert result.exit_code == 0
    table = result.output.split("machine ")[1].splitlines()
    assert table[0].split() == ["verdict", "peak", "in", "phase", "to", "make", "it", "fit"]
    rows = [line.split("  ")[0] for line in table[1:]]
    assert [row.replace(" (tensor_parallel 1)", "") for row in rows] == [
        f"{devices} x {memory} GiB" for devices in (1, 4, 8) for memory in (80, 141)
    ]
    assert rows[0].endswith("(tensor_parallel 1)") and rows[2] == "4 x 80 GiB"
    assert re.search(r"^4 x 80 GiB +fits +[\d.]+ GiB +rollout$", result.output, re.MULTILINE)
    for given in (["--devices", "4"], ["--devices", "4", "--memory", "80"]):
        assert "machine " not in run("plan", AVQA, *given).output


def test_plan_of_pairs_and_of_dynamic_sampling_says_so(run):
    recipes_ = {item.path.stem: item.path for item in all_shipped()}
    text = run("plan", recipes_["dpo_omni_preference"], "--devices", "4", "--memory", "80").output
    assert "before step 1" not in text
    precomputed = run("plan", recipes_["dpo_omni_preference"], "--set", "algorithm.reference=precomputed").output
    assert "before step 1: one forward over all training and validation rows" in precomputed
    assert "a step: 32 pairs\n" in text and "updates a step: 4, each of 8 pairs" in text and "rollout.sleep" not in text
    text = run("plan", recipes_["dapo_avqa_full_method"], "--devices", "4", "--memory", "80").output
    assert "a step: 128 prompts x 16 responses = 2048 sequences, drawn up to 10 times" in text
    assert "a prompt: at most 4160 tokens; a picture takes up to 588 of them, a video of 8 frames 2352" in text


def test_recipes_lists_what_ships(run):
    lines = run("recipes").output.splitlines()
    assert lines[0].split() == ["name", "model", "algorithm", "task", "accelerators", "verified", "on"]
    row = next(line for line in lines if line.startswith("qwen3_omni/gspo_gsm8k"))
    assert "gspo" in row and "gsm8k" in row and "4 x 80 GB" in row
    assert run("recipes", "list").output.splitlines() == lines
    rows = {line.split()[0]: line.split() for line in lines if "/" in line.split(" ")[0]}
    for name, algorithm, task in (
        ("dapo_avqa_full_method", "dapo", "avqa_full_method"),
        ("dpo_omni_preference", "dpo", "omni_preference"),
        ("gspo_nextqa_full", "gspo", "nextqa_full"),
    ):
        assert rows[f"qwen3_omni/{name}"][2:4] == [algorithm, task]


def test_recipes_say_what_they_were_verified_on(run):
    rows = {line.split()[0]: line for line in run("recipes").output.splitlines() if "/" in line.split(" ")[0]}
    assert "2 CPU cores; one H200 (2026-11-30)" in rows["tiny/gspo_quickstart"]
    assert "not yet" in rows["qwen3_omni/gspo_avqa"]


@pytest.mark.parametrize("item", all_shipped(), ids=lambda item: item.name)
def test_a_shipped_recipe_is_short_says_what_it_was_verified_on_and_leaves_the_schema_line_to_copy(item):
    text = item.path.read_text()
    assert len(text.splitlines()) <= 40 and "verified on" in item.notes and "#:schema" not in text


def test_plan_shows_the_margin_that_is_missing(run):
    text = run("plan", AVQA, "--devices", "2", "--memory", "80").output
    assert re.search(r"does not fit: [\d.]+ GiB of 80 GiB, [\d.]+ (GiB|MiB) too much", text), text
    assert " spare" in run("plan", AVQA, "--devices", "4", "--memory", "80").output


@pytest.mark.parametrize("flags", [("--memory", "0"), ("--memory", "-1"), ("--memory", "nan"), ("--devices", "0")])
def test_plan_refuses_a_machine_that_cannot_be(run, flags):
    assert run("plan", AVQA, *flags).exit_code == 2


def test_plan_refuses_to_keep_the_best_by_a_metric_that_no_run_writes(run):
    best = 'checkpoint.keep_best={metric="train/reward_meen"}'
    with pytest.raises(RecipeError, match=r"train/reward_meen is no metric of a run; did you mean train/reward_mean\?"):
        run("plan", AVQA, "--devices", "4", "--set", best)


def test_recipes_show_prints_the_file(run):
    assert run("recipes", "show", "gspo_avqa").output == AVQA.read_text()


def test_a_copied_recipe_begins_with_the_schema_that_lies_beside_it(run, tmp_path):
    run("recipes", "copy", "qwen3_omni/gspo_avqa.toml", "mine/my.toml")
    text = (tmp_path / "mine" / "my.toml").read_text()
    assert text.splitlines()[0] == "#:schema ./omnitrain.schema.json"
    assert tomli.loads(text) == tomli.loads(AVQA.read_text())
    assert "definitions" in json.loads((tmp_path / "mine" / "omnitrain.schema.json").read_text())
    assert run("plan", "mine/my.toml", "--devices", "2").exit_code == 0


def test_copying_over_a_file_needs_force(run, tmp_path):
    run("recipes", "copy", "gspo_avqa")
    (tmp_path / "gspo_avqa.toml").write_text("mine")
    with pytest.raises(UsageError, match="gspo_avqa.toml exists"):
        run("recipes", "copy", "gspo_avqa")
    assert (tmp_path / "gspo_avqa.toml").read_text() == "mine"
    run("recipes", "copy", "gspo_avqa", "--force")


def test_an_unknown_recipe_suggests_one(run):
    with pytest.raises(UsageError, match="no recipe gspo_avqaa; did you mean gspo_avqa?"):
        run("recipes", "show", "gspo_avqaa")


def test_recipes_are_found_in_the_wheel_s_folder_first(run, tmp_path, monkeypatch):
    package = tmp_path / "site" / "omnitrain"
    (package / "_recipes" / "tiny").mkdir(parents=True)
    (package / "_recipes" / "tiny" / "a_b.toml").write_text(AVQA.read_text())
    monkeypatch.setattr("omnitrain.__file__", str(package / "__init__.py"))
    assert [item.name for item in all_shipped()] == ["tiny/a_b"]


def test_schema_is_json_on_the_screen_or_in_a_file(run, tmp_path):
    shown = json.loads(run("schema").output)
    run("schema", "-o", "s.json")
    assert json.loads((tmp_path / "s.json").read_text()) == shown
    with pytest.raises(UsageError, match="cannot write"):
        run("schema", "-o", tmp_path)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("train.learning_rate", ["a number, >= 0, required", "Peak learning rate"]),
        ("learning_rate", ["train.learning_rate"]),
        ("algorithm.clip_low", ['with algorithm.kind = "gspo"', "default 0.0003"]),
        ("rewards[].weight", ["rewards[].weight", "default 1.0"]),
        ("rewards.weight", ["rewards[].weight"]),
        ("rollout", ['engine = "trainer"', "group_size"]),
        ("gspo", ["arXiv 2507.18071", "clip_low"]),
        ("dapo", ["arXiv 2503.14476", "overlong_buffer"]),
        ("algorithm.kl", ['algorithm.kl   (with algorithm.kind = "gspo" or "dapo")\na number']),
        ("algorithm.correction", ["optional table", "reject_high"]),
        ("data.video", ["max_frames"]),
        ("unified_reward", ["OpenAI-compatible", "axes"]),
        ("g6", ["Pearson", "likely causes", 'skip = ["g6"]']),
        ("g6", ["`omnitrain bench RECIPE --agreement`"]),
        ("g3", ["every trained tensor", "with sft and dpo: every adapter is trained"]),
        ("g5", ["with dpo: the reference is the policy that training starts from", "Skipped where model.init_from"]),
        ("g10", ["also with sft and dpo"]),
        ("G4", ["sigmas", "not in this version"]),
        ("g11", ["not in this version"]),
        ("rewards[0].function", ["rewards[].function", "package.module:function"]),
        ("python", ["answer (str or None", "on_failure"]),
        ("train/reward_mean", ["Mean reward over the step's samples"]),
        ("val/avqa/accuracy", ["Share of validation rows answered right"]),
        ("3", ["GateRefused"]),
        ("exit 2", ["RecipeError"]),
        ("RecipeError", ["exit code 2"]),
        ("validate.every", ["Steps between validations"]),
    ],
)
def test_explain(run, topic, expected):
    output = run("explain", topic).output
    assert all(text in output for text in expected), output


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("train.lrr", "did you mean"),
        ("learning_rat", "did you mean learning_rate?"),
        ("g12", "did you mean g1"),
        ("GateRefuse", "did you mean GateRefused?"),
        ("7", "0, 1, 2, 3, 130"),
        ("zzzz", r"a gate (g1, g2, g3, g5, g6, g7, g9, g10)"),
    ],
)
def test_explaining_the_unknown_is_a_usage_error_with_a_hint(run, topic, hint):
    with pytest.raises(UsageError, match=re.escape(hint)) as caught:
        run("explain", topic)
    assert caught.value.exit_code == 2


SCRIPT = """
import sys, typer
from omnitrain.cli import explain, plan, recipes, schema
app = typer.Typer()
for module in (plan, recipes, schema, explain):
    module.register(app)
try:
    app(sys.argv[1:], standalone_mode=False)
except typer.Exit as done:
    assert done.exit_code == 0
heavy = {"torch", "vllm", "transformers", "pyarrow", "numpy", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "arguments",
    [["plan", str(AVQA), "--devices", "4", "--memory", "80"], ["plan", str(AVQA)], ["schema"], ["recipes"], ["explain", "g6"]],
    ids=lambda arguments: arguments[0],
)
def test_nothing_heavy_is_imported(arguments):
    root = Path(plan.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
