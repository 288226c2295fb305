"""Recipe files and command-line overrides merged into one tree that remembers where each value came from."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli

from omnitrain.errors import RecipeError
from omnitrain.recipe import spans
from omnitrain.recipe.fields import is_list, lookup, similar

Key = spans.Path


@dataclass(frozen=True)
class Document:
    """A recipe file: its name as the user wrote it, and its text."""

    name: str
    text: str

    @cached_property
    def spans(self) -> dict[Key, spans.Span]:
        return spans.spans(self.text)

    def excerpt(self, start: int, end: int) -> str:
        """The line of a character range with a caret under it."""
        line, column = spans.position(self.text, start)
        text = self.text.split("\n")[line - 1]
        width = max(1, min(end - start, len(text) - column + 1))
        shown = "".join(char if char.isprintable() or char == "\t" else "?" for char in text)
        margin = "".join("\t" if char == "\t" else " " for char in shown[: column - 1])
        return f"{line:>5} | {shown}\n      | {margin}{'^' * width}"

    def head(self, start: int) -> str:
        line, column = spans.position(self.text, start)
        return f"{self.name}:{line}:{column}"


@dataclass(frozen=True)
class Place:
    """Where a value came from: a path in a file, or a command-line flag."""

    document: Document | None = None
    path: Key = ()
    flag: str = ""

    def message(self, text: str, at_value: bool = False) -> str:
        """`text` after the position, with the line and a caret below for a file."""
        if self.document is None:
            return f"{self.flag}: {text}"
        span = self.document.spans.get(self.path)
        if span is None:
            return f"{self.document.name}: {text}"
        start, end = span.value if at_value else span.key
        return f"{self.document.head(start)} {text}\n{self.document.excerpt(start, end)}"

    @property
    def origin(self) -> str:
        """The short form that the plan prints: "recipe.toml:14" or "--set"."""
        if self.document is None:
            return self.flag.split(" ")[0]
        span = self.document.spans.get(self.path)
        line = spans.position(self.document.text, span.key[0])[0] if span else 1
        return f"{Path(self.document.name).name}:{line}"


@dataclass
class Tree:
    """The merged recipe as plain data, and a Place for every path that something set."""

    raw: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)

    def get(self, path: Key) -> Any:
        """The value at a path, None if nothing is there."""
        value: Any = self.raw
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def put(self, path: Key, value: Any, place: Callable[[Key], Place]) -> None:
        """Set a value. A table merges into a table; anything else replaces. `place` maps a path to its Place."""
        if isinstance(value, dict) and isinstance(self.get(path), dict):
            self.places.setdefault(path, place(path))
            for name, item in value.items():
                self.put(path + (name,), item, place)
            return
        self._forget(path)
        holder = self.raw
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = {} if isinstance(value, dict) else [] if isinstance(value, list) else value
        self.places[path] = place(path)
        if isinstance(value, dict):
            for name, item in value.items():
                self.put(path + (name,), item, place)
        elif isinstance(value, list):
            for item in value:
                self.append(path, item, place)

    def append(self, path: Key, item: Any, place: Callable[[Key], Place]) -> None:
        """Add an item to the list at `path`."""
        items = self.get(path)
        items.append(None)
        self.put(path + (len(items) - 1,), item, place)

    def remove(self, path: Key) -> None:
        """Take a value out; items of a list after it move up."""
        holder = self.get(path[:-1])
        del holder[path[-1]]
        self._forget(path)
        if isinstance(path[-1], int):
            depth, index = len(path) - 1, path[-1]
            moved = {}
            for key, place in self.places.items():
                if key[:depth] == path[:-1] and len(key) > depth and key[depth] > index:
                    key = key[:depth] + (key[depth] - 1,) + key[depth + 1 :]
                moved[key] = place
            self.places = moved

    def _forget(self, path: Key) -> None:
        self.places = {key: place for key, place in self.places.items() if key[: len(path)] != path}


def read(path: Path) -> tuple[Document, dict[str, Any]]:
    """Read one recipe file. RecipeError if it is missing, a directory, not text, or not TOML."""
    name = str(path)
    if path.is_dir():
        inside = sorted(item.name for item in path.glob("*.toml"))
        raise RecipeError(f"{name} is a directory, not a recipe" + (f"; in it: {', '.join(inside)}" if inside else ""))
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n").removeprefix("\ufeff")
    except FileNotFoundError:
        if found := _shipped(name):
            hint = f"it ships with omnitrain: `omnitrain recipes copy {found}`"
            raise RecipeError(f"no recipe file {name}; {hint}") from None
        near = similar(path.stem, [item.stem for item in path.parent.glob("*.toml")])
        hint = f"did you mean {path.parent / near}.toml?" if near else "see `omnitrain recipes` for the ones that ship"
        raise RecipeError(f"no recipe file {name}; {hint}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name} is not a text file in UTF-8 (byte {error.start}); a recipe is TOML") from None
    except OSError as error:
        raise RecipeError(f"cannot read {name}: {error.strerror}") from None
    document = Document(name, text)
    try:
        return document, tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        start = min(error.pos, max(0, len(text) - 1))
        what = error.msg[:1].lower() + error.msg[1:]
        raise RecipeError(f"{document.head(start)} not TOML: {what}\n{document.excerpt(start, start + 1)}") from None


def _shipped(name: str) -> str | None:
    """The name of the shipped recipe that `name` names, or None."""
    from omnitrain.recipe.shipped import all_shipped

    wanted = name.removeprefix("recipes/").removesuffix(".toml")
    found = [recipe.name for recipe in all_shipped() if wanted in (recipe.name, recipe.path.stem)]
    return found[0] if len(found) == 1 else None


_STEP = re.compile(r'(?P<name>[A-Za-z0-9_-]+|"[^"]*")(?P<indices>(?:\[\d+\])*)(?:\.(?=.)|$)')


def parse_key(text: str, flag: str) -> Key:
    """`rewards[0].weight` -> ("rewards", 0, "weight")."""
    path: list[str | int] = []
    at = 0
    while at < len(text) or not path:
        match = _STEP.match(text, at)
        if match is None:
            raise RecipeError(
                f"{flag}: {text!r} is not a field name; write it as train.learning_rate or rewards[0].weight"
            )
        path.append(match["name"].strip('"'))
        path += [int(index) for index in re.findall(r"\d+", match["indices"])]
        at = match.end()
    return tuple(path)


def parse_value(text: str, flag: str) -> Any:
    """A value in TOML syntax; a bare word, path or phrase is taken as a string where it cannot mean anything else."""
    text = text.strip()
    try:
        parsed = tomli.loads(f"x = {text}")
    except tomli.TOMLDecodeError as error:
        reason = error.msg.lower()
    else:
        if list(parsed) == ["x"]:
            return parsed["x"]
        reason = "more than one value"
    key = flag.removeprefix("--set ").split("=")[0]
    if not text:
        raise RecipeError(f"{flag}: no value; write {key}='\"\"' for an empty string, or --unset {key}")
    if text.lower() in ("true", "false"):
        raise RecipeError(f"{flag}: write {text.lower()} in lower case")
    if text.lower() in ("none", "null", "nil"):
        raise RecipeError(f"{flag}: TOML has no {text}; write --unset {key}")
    if text[0] in "\"'[{" or "\n" in text or "#" in text:
        raise RecipeError(f"{flag}: {text} is not TOML ({reason}); does the shell need quotes? --set '{key}=...'")
    return text


def apply_set(tree: Tree, argument: str) -> None:
    """Apply `a.b=value` or `list+=item`. A TOML list after += adds all its items."""
    flag = f"--set {argument}"
    name, equals, text = argument.partition("=")
    if not equals:
        raise RecipeError(f"{flag}: no value; write --set {argument}=VALUE")
    adding = name.endswith("+")
    path = parse_key(name.rstrip("+").strip(), flag)
    value = parse_value(text, flag)

    def place(_: Key) -> Place:
        return Place(flag=flag)

    for depth in range(1, len(path)):
        _enter(tree, path[:depth], path[depth], flag, place)
    if isinstance(path[-1], int) and path[-1] >= len(tree.get(path[:-1])):
        raise RecipeError(_no_item(tree, path, flag))
    if not adding:
        tree.put(path, value, place)
        return
    if tree.get(path) is None:
        found = lookup(dotted(path))
        default = found[0].default if found and not found[0].required else []
        if found and not (isinstance(default, (list, tuple)) or is_list(found[0].info.annotation)):
            raise RecipeError(f"{flag}: {dotted(path)} is not a list ({found[0].type}); use = instead of +=")
        tree.put(path, list(default or []), place)
    if not isinstance(tree.get(path), list):
        raise RecipeError(f"{flag}: {dotted(path)} is {literal(tree.get(path))}, not a list; use = instead of +=")
    for item in value if isinstance(value, list) else [value]:
        tree.append(path, item, place)


def apply_unset(tree: Tree, name: str) -> None:
    """Take a field or a table out of the merged recipe. Unsetting what nothing sets is an error."""
    flag = f"--unset {name}"
    path = parse_key(name.strip(), flag)
    if path not in tree.places:
        siblings = [str(key[-1]) for key in tree.places if key[:-1] == path[:-1]]
        near = similar(str(path[-1]), siblings)
        hint = f"; did you mean {dotted(path[:-1] + (near,))}?" if near else ""
        raise RecipeError(f"{flag}: {dotted(path)} is not set by the recipe{hint}")
    tree.remove(path)


def _enter(tree: Tree, path: Key, below: str | int, flag: str, place: Callable[[Key], Place]) -> None:
    """Make sure that `path` holds something that `below` can be set in."""
    if isinstance(path[-1], int) and path[-1] >= len(tree.get(path[:-1])):
        raise RecipeError(_no_item(tree, path, flag))
    value = tree.get(path)
    if isinstance(below, int):
        if not isinstance(value, list):
            raise RecipeError(f"{flag}: {dotted(path)} is " + ("not set" if value is None else "not a list"))
    elif value is None:
        tree.put(path, {}, place)
    elif isinstance(value, list):
        item, rest = (f"[{below}]", "") if below.isdigit() else ("[0]", f".{below}")
        wanted = flag.removeprefix("--set ").split("=")[0].rstrip("+")
        if below.isdigit() and (behind := wanted.removeprefix(f"{dotted(path)}.{below}")) != wanted:
            rest = behind
        raise RecipeError(f"{flag}: {dotted(path)} is a list; name an item, as {dotted(path)}{item}{rest}")
    elif not isinstance(value, dict):
        raise RecipeError(f"{flag}: {dotted(path)} is {literal(value)}, not a table")


def _no_item(tree: Tree, path: Key, flag: str) -> str:
    name, count = dotted(path[:-1]), len(tree.get(path[:-1]))
    items = "1 item" if count == 1 else f"{count} items"
    return f"{flag}: {name} has {items}, the first is {name}[0]; add one with --set {name}+=..."


def dotted(path: Key) -> str:
    """("rewards", 0, "weight") -> "rewards[0].weight"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def literal(value: Any, limit: int = 60) -> str:
    """A value as TOML would write it, cut to `limit` characters."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(literal(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{ " + ", ".join(f"{name} = {literal(item)}" for name, item in value.items()) + " }" if value else "{}"
    else:
        text = str(value)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."
