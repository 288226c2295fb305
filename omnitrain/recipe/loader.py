"""Recipe in, recipe out: load and merge TOML files and overrides; dump the resolved recipe again."""

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from omnitrain.errors import DataError, RecipeError
from omnitrain.recipe import sources
from omnitrain.recipe.problems import located, recipe_error
from omnitrain.recipe.schema import Recipe
from omnitrain.recipe.sources import Document, Place, Tree


@dataclass(frozen=True)
class Loaded:
    """A valid recipe and where its values came from."""

    recipe: Recipe
    tree: Tree
    documents: list[Document]

    @property
    def raw(self) -> dict[str, Any]:
        """The merged TOML data, before defaults."""
        return self.tree.raw

    @property
    def origins(self) -> dict[str, str]:
        """For every plain field of the resolved recipe, dotted: "default", "file.toml:14" or "--set"."""
        return {sources.dotted(path): origin for path, origin in self.origins_by_path.items()}

    @cached_property
    def origins_by_path(self) -> dict[sources.Key, str]:
        """The same by path, as `flatten` gives them."""
        places = self.tree.places
        return {path: places[path].origin if path in places else "default" for path in flatten(self.recipe)}

    def locate(self, message: str) -> str:
        """`message` with the position of the first recipe field it names, for errors found after loading."""
        return located(message, self.tree, self.documents)


def load(paths: Iterable[Path | str], sets: Iterable[str] = (), unsets: Iterable[str] = ()) -> Loaded:
    """Load recipe files, merged left to right, then apply --unset and --set arguments.

    Raises RecipeError listing every problem with its file:line:column (or flag), the line and a caret.
    """
    tree, documents = Tree(), []
    for path in paths:
        document, data = sources.read(Path(path))
        documents.append(document)
        for name, value in data.items():
            tree.put((name,), value, lambda key, document=document: Place(document, key))
    if not documents:
        raise RecipeError("no recipe given; name a TOML file, or copy one with `omnitrain recipes copy`")
    for name in unsets:
        sources.apply_unset(tree, name)
    for argument in sets:
        sources.apply_set(tree, argument)
    _no_dates(tree)
    try:
        # JSON mode is pydantic's strict mode that still takes a path from a string and a tuple from a list.
        recipe = Recipe.model_validate_json(json.dumps(tree.raw), strict=True)
    except ValidationError as error:
        raise recipe_error(error, tree, documents) from None
    return Loaded(recipe, tree, documents)


def check_files(loaded: Loaded, missing_ok: bool = False) -> None:
    """Look at the data files that the recipe names. DataError, with the recipe's position, for each bad one.

    With `missing_ok` only a directory in place of a file is an error: a plan may be made elsewhere.
    """
    data = loaded.recipe.data
    named = [("train", file.path) for file in data.train_files] + [("validation", path) for path in data.validation_files]
    problems = []
    for field, path in named:
        if path.is_dir():
            inside = sorted(str(item) for item in path.glob("*.parquet"))
            hint = f"; did you mean {inside[0]}?" if inside else "; name the parquet file"
            problems.append(loaded.locate(f"data.{field} is a directory: {path}{hint}"))
        elif not path.exists() and not missing_ok:
            problems.append(
                loaded.locate(
                    f"data.{field} does not exist: {path}; write it with `omnitrain prepare`, or correct the path"
                )
            )
    if problems:
        raise DataError("\n".join(problems))


def resolved(recipe: Recipe) -> Recipe:
    """The same recipe with absolute paths, so that it runs from any directory."""
    data = recipe.plain()
    absolute = lambda path: str(Path(path).absolute())  # noqa: E731
    for field in ("train", "validation"):
        if field in data["data"]:
            paths = data["data"][field]
            several = isinstance(paths, list)
            data["data"][field] = [absolute(path) for path in paths] if several else absolute(paths)
    if Path(recipe.model.path).is_dir():
        data["model"]["path"] = absolute(recipe.model.path)
    for field in ("init_from", "adapter"):
        if field in data["model"]:
            data["model"][field] = absolute(data["model"][field])
    return validated(data)


def validated(data: dict[str, Any]) -> Recipe:
    """A recipe from plain data, by the same strict rules as `load`; a mistake here is ours, not the user's."""
    return Recipe.model_validate_json(json.dumps(data), strict=True)


def flatten(recipe: Recipe) -> dict[sources.Key, Any]:
    """Every plain field by its path. An absent optional table or value is one None; lists of values are one value."""
    found: dict[sources.Key, Any] = {}

    def walk(path: sources.Key, value: Any) -> None:
        if isinstance(value, BaseModel):
            for attribute, info in type(value).model_fields.items():
                walk(path + (info.alias or attribute,), getattr(value, attribute))
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for i, item in enumerate(value):
                walk(path + (i,), item)
        else:
            found[path] = value

    walk((), recipe)
    return found


def dump(recipe: Recipe) -> str:
    """TOML text, defaults written out (but for fields without effect), that loads to an equal recipe."""
    lines: list[str] = []
    _table(lines, "", recipe.plain())
    return "\n".join(lines).strip() + "\n"


def _table(lines: list[str], name: str, table: dict[str, Any]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    lists = {
        key: value for key, value in table.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    for key, value in table.items():
        if key not in inner and key not in lists:
            lines.append(f"{key} = {_toml(value)}")
    for key, value in inner.items():
        path = f"{name}.{key}" if name else key
        lines += ["", f"[{path}]"]
        _table(lines, path, value)
    for key, items in lists.items():
        path = f"{name}.{key}" if name else key
        for item in items:
            lines += ["", f"[[{path}]]"]
            _table(lines, path, item)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    raise AssertionError(f"a recipe holds no {type(value).__name__}")


def _no_dates(tree: Tree) -> None:
    """TOML has dates, recipes do not; JSON could not carry one to pydantic."""
    for path, place in tree.places.items():
        value = tree.get(path)
        if isinstance(value, (datetime.date, datetime.time)):
            name = sources.dotted(path)
            raise RecipeError(place.message(f'{name} is a date; write it in quotes: {name} = "{value}"', at_value=True))
