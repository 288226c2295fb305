"""The recipes that come with the package."""

import re
from dataclasses import dataclass
from pathlib import Path

import omnitrain
from omnitrain.errors import UsageError
from omnitrain.recipe.fields import similar

_HEADER = re.compile(r"#\s*([a-z][a-z ]*):\s*(.+)")


@dataclass(frozen=True)
class Shipped:
    """One recipe file: its name such as "qwen3_omni/gspo_avqa", and what its leading comments say."""

    name: str
    path: Path
    notes: dict[str, str]
    """The header lines `# key: value`, such as accelerators and "verified on"."""

    @property
    def task(self) -> str:
        """What follows the algorithm in the file's name."""
        return self.path.stem.partition("_")[2] or self.path.stem


def folder() -> Path:
    """`recipes/` as the wheel maps it into the package, or of the source tree."""
    package = Path(omnitrain.__file__).parent
    mapped = package / "_recipes"
    return mapped if mapped.is_dir() else package.parent / "recipes"


def all_shipped() -> list[Shipped]:
    """All recipes, by name."""
    root = folder()
    return [
        Shipped(path.relative_to(root).with_suffix("").as_posix(), path, _notes(path))
        for path in sorted(root.rglob("*.toml"))
    ]


def find(name: str) -> Shipped:
    """The recipe of this name, with or without its folder and ".toml". UsageError if there is none, or several."""
    wanted = name.removesuffix(".toml")
    recipes = all_shipped()
    found = [recipe for recipe in recipes if recipe.name == wanted] or [
        recipe for recipe in recipes if recipe.path.stem == wanted
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name} is the name of several recipes: {', '.join(recipe.name for recipe in found)}")
    near = similar(wanted, [recipe.name for recipe in recipes]) or similar(
        wanted, [recipe.path.stem for recipe in recipes]
    )
    hint = f"did you mean {near}?" if near else "`omnitrain recipes` lists them"
    raise UsageError(f"no recipe {name}; {hint}")


def _notes(path: Path) -> dict[str, str]:
    notes = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if match := _HEADER.match(line):
            notes[match[1].strip()] = match[2].strip()
    return notes
