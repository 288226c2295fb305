import pytest

RECIPE = """\
name = "example"
seed = 42

[model]
family = "qwen3_omni"
path = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
lora = { rank = 32, alpha = 64 }

[data]
train = "data/train.parquet"

[algorithm]
kind = "gspo"

[rollout]
group_size = 16
tensor_parallel = 2

[[rewards]]
kind = "choice"

[train]
prompts_per_step = 128
prompts_per_update = 16
learning_rate = 3e-6
epochs = 10
"""


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    """A function that writes recipe.toml (optionally with a piece of text replaced) in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "", name: str = "recipe.toml"):
        assert old in RECIPE
        path = tmp_path / name
        path.write_text(RECIPE.replace(old, new, 1) if old else RECIPE)
        return path.relative_to(tmp_path)

    return write
