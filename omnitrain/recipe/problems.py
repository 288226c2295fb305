"""pydantic's errors, and our own cross-field ones, as lines that name a place and a fix."""

import re
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from omnitrain.errors import RecipeError
from omnitrain.recipe.fields import all_fields, named, similar, tables, tag, type_text
from omnitrain.recipe.schema import Recipe
from omnitrain.recipe.sources import Document, Key, Place, Tree, dotted, literal

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
# Fields with a pattern.
_FORMS = {
    "function": 'of the form "module:function"',
    "name": "a name of letters, digits, dots, dashes and underscores that begins with a letter or a digit",
}


def recipe_error(error: ValidationError, tree: Tree, documents: list[Document]) -> RecipeError:
    """All of a ValidationError's problems as one RecipeError, in the order of the recipe's text."""
    found: dict[str, Key] = {}
    meant: set[str] = set()
    by_path: dict[Key, list[dict]] = {}
    for item in error.errors(include_url=False):
        by_path.setdefault(_Walk(item["loc"]).path, []).append(item)
    for path, items in sorted(by_path.items(), key=lambda entry: entry[1][0]["type"] != "extra_forbidden"):
        if _hidden(path, by_path, tree) or dotted(path) in meant:
            continue
        text, name = _describe(path, items, tree)
        if name:
            meant.add(name)
        found.setdefault(_located(text, path, items[0]["type"], tree, documents), path)
    order = {path: i for i, path in enumerate(tree.places)}
    lines = sorted(found, key=lambda line: order.get(found[line], len(order)))
    if len(lines) > 1:
        lines.append(f"{len(lines)} problems in the recipe")
    return RecipeError("\n".join(lines))


def located(message: str, tree: Tree, documents: list[Document], path: Key = ()) -> str:
    """`message` with the position of the first field it names that the recipe sets, else of `path`."""
    names = re.findall(r"\[\[?(\w+)\]\]?|\b(\w+(?:\[\d+\])?(?:\.\w+)+)", message)
    for name in (table or field for table, field in names):
        for key, place in tree.places.items():
            if dotted(key) == name:
                return place.message(message)
    return _parent_place(path, tree, documents).message(message)


class _Walk:
    """A pydantic location as a TOML path: the tags of unions and the branches of plain unions taken out."""

    def __init__(self, location: tuple[str | int, ...]):
        path: list[str | int] = []
        models, choosing = (Recipe,), False
        self.models: tuple = models
        self.annotation: Any = Recipe
        for part in location:
            if choosing and isinstance(part, str):
                models = tuple(model for model in models if (tag(model) or ("", ""))[1] == part) or models
                choosing = False
            elif isinstance(part, int):
                path.append(part)
            elif models:
                path.append(part)
                self.models = models
                infos = [named(model)[part] for model in models if part in named(model)]
                self.annotation = infos[0].annotation if infos else None
                models = tables(self.annotation) if infos else ()
                choosing = len(models) > 1
            elif (values := _values_of(self.annotation)) is not None:  # a key of a plain table
                path.append(part)
                self.annotation = values
        self.path: Key = tuple(path)


def _values_of(annotation: Any) -> Any:
    """The type of the values of a field that is a table of any keys (or nothing); None for another field."""
    found = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is dict]
    return get_args(found[0])[1] if found else None


def _hidden(path: Key, by_path: dict[Key, list[dict]], tree: Tree) -> bool:
    """Errors below a table whose kind is wrong say nothing: its fields were checked against the wrong kind."""
    for model_tag in ("kind", "family", "engine"):
        tag_path = path[:-1] + (model_tag,)
        if tag_path in by_path and tag_path != path and by_path[tag_path][0]["type"] == "literal_error":
            return True
    # A plain union (a string or a list) reports every branch: the deepest one is about what was written.
    deeper = any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
    return deeper and by_path[path][0]["type"].endswith("_type")


def _describe(path: Key, items: list[dict], tree: Tree) -> tuple[str, str | None]:
    """The message, and the dotted name of a field that the user probably meant."""
    item, walk = items[0], _Walk(items[0]["loc"])
    name, value, kind, context = dotted(path), item["input"], item["type"], item.get("ctx") or {}
    if kind == "extra_forbidden":
        return _unknown(path, walk.models, value, tree)
    if kind == "missing":
        return _missing(path, walk, tree), None
    if kind == "value_error":
        return str(context["error"]), None
    if kind in ("union_tag_invalid", "union_tag_not_found", "literal_error"):
        return _choice(path, walk, kind, value, tree), None
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{name} = {literal(value)} must be {words} {context[key]:g}", None
    if kind == "string_pattern_mismatch":
        return f"{name} = {literal(value)} is not {_form(path)}", None
    if kind == "finite_number":
        return f"{name} = {literal(value)} must be a finite number", None
    if kind in ("too_short", "string_too_short") and not value:
        return f"{name} is empty; give it something, or remove it", None
    if kind in ("too_long", "too_short"):
        return f"{name} = {literal(value)} must be {type_text(walk.annotation)}", None
    if kind.endswith(("_type", "_parsing", "_from_float", "_attributes_type")):
        wanted = type_text(walk.annotation) if not isinstance(path[-1], int) else _item_text(walk.annotation)
        text = f"{name} must be {wanted}, not {_kind_of(value)} ({literal(value)})"
        place = tree.places.get(path)
        if place and place.flag and "a string" in wanted and not isinstance(value, (dict, list)):
            text += f"""; write --set '{name}="{literal(value)}"'"""
        elif isinstance(value, str) and "string" not in wanted and literal(value).strip('"').replace(".", "").isdigit():
            text += f"; write {name} = {value} without quotes"
        elif isinstance(value, dict) and isinstance(path[-1], str) and wanted == "a list of tables":
            text += f"; write [[{name}]]"
        return text, None
    return f"{name}: {item['msg'][:1].lower()}{item['msg'][1:]}", None


def _form(path: Key) -> str:
    """What a pattern asks for, as a user would say it."""
    return _FORMS.get(str(path[-1])) or f"of the right form: {_doc(path)}"


def _unknown(path: Key, models: tuple, value: Any, tree: Tree) -> tuple[str, str | None]:
    name, last, table = dotted(path), str(path[-1]), path[:-1]
    what = f"unknown table [{name}]" if isinstance(value, dict) and len(path) == 1 else f"unknown field {name}"
    here = ".".join(str(part) for part in table if isinstance(part, str))
    if owners := _owners(here, last):
        return f"{name} has no effect with {_chosen(table, models)}; it belongs to {owners}", None
    siblings = [sibling for model in models for sibling in named(model)]
    if near := similar(last, siblings):
        return f"{what}; did you mean {dotted(table + (near,))}?", dotted(table + (near,))
    if near := similar(last, [field.name for field in all_fields() if field.kind and _plain(field.table) == here]):
        return f"{what}; did you mean {dotted(table + (near,))}? It belongs to {_owners(here, near)}", None
    elsewhere = [field for field in all_fields() if field.name == last and "[]" not in field.path]
    if not elsewhere and (near := similar(last, [field.name for field in all_fields()], at_least=0.8)):
        elsewhere = [field for field in all_fields() if field.name == near]
    if elsewhere:
        return f"{what}; did you mean {elsewhere[0].path}?", elsewhere[0].path
    owner = f"[{here}]" if here else "a recipe"
    return f"{what}; {owner} has {', '.join(dict.fromkeys(siblings))}", None


def _owners(table: str, name: str) -> str:
    """The kinds of `table` that have a field `name`, in words; "" if it belongs to no kind in particular."""
    owners = [
        field.kind for field in all_fields() if field.kind and field.name == name and _plain(field.table) == table
    ]
    return f"{_plain(owners[0][0])} = " + " or ".join(f'"{value}"' for _, value in owners) if owners else ""


def _chosen(table: Key, models: tuple) -> str:
    name, value = tag(models[0])
    return f'{dotted(table + (name,))} = "{value}"'


def _plain(path: str) -> str:
    return path.replace("[]", "")


def _missing(path: Key, walk: _Walk, tree: Tree) -> str:
    found = tables(walk.annotation)
    if isinstance(path[-1], int):
        return f"{dotted(path[:-1])} = {literal(tree.get(path[:-1]))} must be {type_text(walk.annotation)}"
    if found:
        needs = [f"{dotted(path)}.{name}" for name, info in named(found[0]).items() if info.is_required()]
        return f"missing table [{dotted(path)}]" + (f"; it needs {', '.join(needs)}" if needs else "")
    return f"missing field {dotted(path)} ({type_text(walk.annotation)}): {_doc(path)}"


def _choice(path: Key, walk: _Walk, kind: str, value: Any, tree: Tree) -> str:
    """A wrong or missing kind, or a value that is not one of a few."""
    if kind == "literal_error":
        annotation = walk.annotation
        while get_origin(annotation) is not Literal:
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
        choices, name, chosen = list(get_args(annotation)), dotted(path), value
    else:
        members = [tag(model) for model in tables(walk.annotation)]
        choices, name = [member[1] for member in members], dotted(path + (members[0][0],))
        if not isinstance(value, dict):
            return f"{dotted(path)} must be a table, not {_kind_of(value)} ({literal(value)})"
        if members[0][0] not in value:
            return f"missing field {name}; valid: {_quoted(choices)}"
        chosen = value[members[0][0]]
    near = similar(chosen, choices) if isinstance(chosen, str) else None
    return f"{name} = {literal(chosen)} is not valid; valid: {_quoted(choices)}" + (
        f'; did you mean "{near}"?' if near else ""
    )


def _located(text: str, path: Key, kind: str, tree: Tree, documents: list[Document]) -> str:
    if kind == "value_error":
        return located(text, tree, documents, path)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        for tag_name in ("kind", "family", "engine"):
            if path + (tag_name,) in tree.places:
                return tree.places[path + (tag_name,)].message(text, at_value=True)
    at_value = kind not in ("extra_forbidden", "missing", "union_tag_not_found")
    if path in tree.places:
        return tree.places[path].message(text, at_value)
    return _parent_place(path, tree, documents).message(text)


def _parent_place(path: Key, tree: Tree, documents: list[Document]) -> Place:
    for depth in range(len(path), 0, -1):
        if path[:depth] in tree.places:
            return tree.places[path[:depth]]
    return Place(document=documents[0]) if documents else Place(flag="recipe")


def _doc(path: Key) -> str:
    wanted = ".".join(str(part) for part in path if isinstance(part, str))
    return next((field.doc for field in all_fields() if _plain(field.path) == wanted), "")


def _item_text(annotation: Any) -> str:
    inner = tables(annotation)
    lists = [annotation, *(branch for branch in get_args(annotation) if get_args(branch))]
    return "a table" if inner else type_text(get_args(lists[-1])[0])


def _quoted(choices: list[str]) -> str:
    return ", ".join(f'"{choice}"' for choice in choices)


def _kind_of(value: Any) -> str:
    kinds = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "a list", dict: "a table"}
    return kinds.get(type(value), f"a {type(value).__name__}")
