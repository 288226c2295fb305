"""The recipe's fields as data: names, types in words, defaults, docs, and which kind each belongs to.

Error messages, `omnitrain explain` and the plan read the schema through this module alone.
"""

import difflib
import types
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from omnitrain.recipe.schema import Recipe

# What people who come from other tools write.
_SYNONYMS = {
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "mini_batch_size": "prompts_per_update",
    "num_generations": "group_size",
    "n": "group_size",
    "max_grad_norm": "grad_clip",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_tokens": "max_new_tokens",
    "tp": "tensor_parallel",
    "kl_coef": "kl",
}


@dataclass(frozen=True)
class Field:
    """One field of the recipe."""

    path: str
    """Dotted, list items as `rewards[].weight`."""
    name: str
    table: str
    model: type[BaseModel]
    info: FieldInfo
    kind: tuple[str, str] | None
    """The tag field's path and value, where the field exists for that kind only: ("algorithm.kind", "gspo")."""

    @property
    def doc(self) -> str:
        """The field's docstring; for a table the docstrings of its kinds."""
        if self.info.description:
            return self.info.description
        return " / ".join((model.__doc__ or "").strip() for model in tables(self.info.annotation))

    @property
    def type(self) -> str:
        return type_text(self.info.annotation)

    @property
    def required(self) -> bool:
        return self.info.is_required()

    @property
    def default(self) -> Any:
        """The default value; None where there is none (a required field, or one that may be left out)."""
        return None if self.required else self.info.get_default(call_default_factory=True)

    @property
    def limits(self) -> str:
        """Bounds in words, "" if there are none."""
        words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        return ", ".join(
            f"{sign} {getattr(rule, name)}"
            for rule in self.info.metadata
            for name, sign in words.items()
            if getattr(rule, name, None) is not None
        )


def tables(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models of a table field: one, or one for each kind. Empty for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    found: dict[type[BaseModel], None] = {}
    if get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            found.update(dict.fromkeys(tables(argument)))
    return tuple(found)


def is_list(annotation: Any) -> bool:
    """Whether the field is a list of tables or of values."""
    return get_origin(annotation) is list


def named(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A table's fields by the names that TOML uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def tag(model: type[BaseModel]) -> tuple[str, str] | None:
    """The field that names the kind and its value, such as ("kind", "gspo")."""
    for name, info in named(model).items():
        if get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
            return name, get_args(info.annotation)[0]
    return None


def type_text(annotation: Any) -> str:
    """A type as a user would say it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0])
    if tables(annotation):
        return "a list of tables" if is_list(annotation) else "a table"
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(argument) for argument in args if argument is not type(None))
    if origin is dict:
        return f"a table of {_PLURALS[args[1]]}"
    if origin is tuple:
        return "[" + ", ".join(_NAMES.get(argument, str(argument)) for argument in args) + "]"
    if origin is list:
        return f"a list of {_PLURALS.get(args[0]) or type_text(args[0])}"
    return _NAMES.get(annotation, str(annotation))


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path (a string)"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", Path: "paths"}


@cache
def all_fields() -> tuple[Field, ...]:
    """Every field of every table and kind, in the order of the schema."""
    return tuple(_walk("", (Recipe,)))


def _walk(table: str, models: tuple[type[BaseModel], ...]):
    shared = set.intersection(*(set(named(model)) for model in models))
    seen = set()
    for model in models:
        found_tag = tag(model) if len(models) > 1 else None
        for name, info in named(model).items():
            common = name in shared and len(models) > 1 and name != (found_tag or ("",))[0]
            if common and name in seen:
                continue
            seen.add(name)
            path = f"{table}.{name}" if table else name
            kind = (f"{table}.{found_tag[0]}", found_tag[1]) if found_tag and not common else None
            yield Field(path, name, table, model, info, kind)
            if inner := tables(info.annotation):
                yield from _walk(path + ("[]" if is_list(info.annotation) else ""), inner)


def lookup(path: str) -> list[Field]:
    """The fields with this dotted path (several if kinds differ), or, for a bare name, with this last name."""
    path = path.strip("[]").replace("[].", ".")
    exact = [field for field in all_fields() if field.path.replace("[].", ".") == path]
    return exact or [field for field in all_fields() if "." not in path and field.name == path]


def similar(word: str, names: list[str], at_least: float = 0.67) -> str | None:
    """The name that `word` was most likely meant to be, abbreviations included, or None."""
    if _SYNONYMS.get(word) in names:
        return _SYNONYMS[word]
    word = word.lower().replace("-", "_")

    def score(name: str) -> float:
        initials = "".join(part[0] for part in name.split("_") if part) if "_" in name else ""
        whole = difflib.SequenceMatcher(None, word, name.lower()).ratio()
        short = difflib.SequenceMatcher(None, word, initials).ratio() if len(word) >= 2 else 0.0
        return max(whole, short if short >= 0.8 else 0.0)

    best = max(names, key=score, default=None)
    return best if best is not None and score(best) >= at_least else None
