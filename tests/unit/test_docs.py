"""What the docs say, where a test can tell whether it is so."""

import re
from pathlib import Path

import pytest

from omnitrain.errors import OmnitrainError
from omnitrain.recipe.loader import load
from omnitrain.rundir import RunDir

ROOT = Path(__file__).parents[2]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_example_reward_tells_right_from_wrong(capsys):
    space: dict = {}
    exec(blocks("docs/rewards.md", "python")[0], space)
    row = {"id": "a", "answer": "<answer>A</answer>", "source": "avqa", "meta": {}}
    assert (space["score"]("A", row), space["score"]("B", row)) == (1.0, 0.0)
    assert space["score"]("A", row | {"answer": None}) == 0.0
    assert "a True" in capsys.readouterr().out


def test_the_example_reward_table_and_the_readme_recipe_load(tmp_path):
    recipe = blocks("README.md", "toml")[0]
    path = tmp_path / "recipe.toml"
    path.write_text(recipe)
    load([path])
    path.write_text(recipe.replace('[[rewards]]\nkind = "choice"\n', blocks("docs/rewards.md", "toml")[0]))
    assert load([path]).recipe.rewards[0].function == "my_rewards:score"


def test_the_run_directory_page_names_everything_in_a_run_directory():
    text = (ROOT / "docs" / "run-directory.md").read_text()
    run = RunDir("r")
    names = {value.name for value in vars(run).values() if isinstance(value, Path) and value != run.path}
    assert [name for name in sorted(names) if f"`{name}" not in text] == []
    codes = {error.exit_code for error in [OmnitrainError, *_below(OmnitrainError)]} | {0}
    assert set(map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE))) == codes


def _below(error: type) -> list[type]:
    return [one for child in error.__subclasses__() for one in (child, *_below(child))]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


def test_the_corrections_in_the_algorithms_page_load(tmp_path):
    recipe = blocks("README.md", "toml")[0]
    tables = blocks("docs/algorithms.md", "toml")
    assert len(tables) == 3
    for table in tables:
        path = tmp_path / "recipe.toml"
        path.write_text(recipe + "\n" + table)
        assert load([path]).recipe.algorithm.correction is not None
