"""`omnitrain explain`: a recipe field, a gate, or an exit code, from the same texts as the errors."""

import inspect
import re
from typing import Annotated

import typer

from omnitrain import errors


def register(app: typer.Typer) -> None:
    """Add `explain` to the main command."""
    app.command()(explain)


def explain(
    topic: Annotated[
        str,
        typer.Argument(metavar="X", help="A recipe field, a table, a kind, a gate, a metric, an exit code or an error."),
    ],
) -> None:
    """Explain a recipe field (train.learning_rate), a kind (gspo, python), a gate (g6), an exit code (3) and more.

    Also a name of metrics.jsonl (train/reward_mean) or an error (GateRefused).
    """
    from omnitrain.recipe.fields import lookup, similar
    from omnitrain.recipe.gates import GATES

    word = topic.strip()
    if word.lower() in GATES:
        typer.echo(_gate(word.lower()))
    elif match := re.fullmatch(r"(?:exit\s*)?(\d+)", word):
        typer.echo(_exit_code(int(match[1])))
    elif word in _errors():
        error = _errors()[word]
        typer.echo(f"{word} (exit code {error.exit_code})\n{inspect.cleandoc(error.__doc__ or '')}")
    elif kinds := _kinds(word):
        typer.echo("\n\n".join(kinds))
    elif "/" in word and (metric := _metric(word)):
        typer.echo(metric)
    elif fields := lookup(re.sub(r"\[\d*\]", "[]", word)):
        typer.echo("\n\n".join(_fields(fields)))
    else:
        known = _topics()
        near = similar(word, known) or similar(word.rsplit(".", 1)[-1], [name for name in known if "." not in name])
        hint = f"did you mean {near}?" if near else f"give a recipe field, a gate ({_gates()}), a metric, or an exit code"
        raise errors.UsageError(f"nothing to explain about {topic}; {hint}")


def _gate(name: str) -> str:
    from omnitrain.recipe.gates import GATES, OFFLINE
    from omnitrain.recipe.schema import GATES as IN_RECIPE
    from omnitrain.recipe.schema import OFFLINE_GATES

    gate, offline = GATES[name], OFFLINE.get(name)
    if name not in IN_RECIPE:
        return f"gate {name}: {gate.title}\nnot in this version: no recipe has what it compares yet\n{gate.compares}"
    kinds = " and ".join(kind for kind, names in OFFLINE_GATES.items() if name in names)
    texts = [f"gate {name}: {_words(gate)}"]
    if offline == gate:
        texts[0] += f"\nalso with {kinds}"
    elif offline:
        texts.append(f"with {kinds}: {_words(offline)}")
    return "\n\n".join(texts) + f'\n\nto skip it: [gates] skip = ["{name}"]'


def _words(gate) -> str:
    causes = "\n".join(f"  - {cause}" for cause in gate.causes)
    return f"{gate.title}\n{gate.compares}\nlikely causes:\n{causes}\nfix: {gate.fix}"


def _gates() -> str:
    from omnitrain.recipe.schema import GATES

    return ", ".join(GATES)


def _metric(word: str) -> str | None:
    """A name of metrics.jsonl and its meaning; names of rewards and tasks as they are in a run, too."""
    from omnitrain.train.metrics import METRICS, family

    name = family(word)
    return f"{word}   (in metrics.jsonl)\n{METRICS[name]}" if name in METRICS else None


def _fields(fields) -> list[str]:
    """A text for each field; kinds whose field of this name is the same share one."""
    kinds: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for field in fields:
        kinds.setdefault((field.path, _field(field)), []).extend([field.kind] if field.kind else [])
    heads = {
        key: f"   (with {found[0][0]} = " + " or ".join(f'"{kind}"' for _, kind in found) + ")" if found else ""
        for key, found in kinds.items()
    }
    return [f"{path}{heads[path, text]}\n{text}" for path, text in kinds]


def _field(field) -> str:
    from omnitrain.recipe.fields import named, tables, tag
    from omnitrain.recipe.sources import literal

    lines = []
    inner = tables(field.info.annotation)
    if inner:
        lines.append("required table" if field.required else "optional table")
        for model in inner:
            kind = tag(model)
            lines.append((f'{kind[0]} = "{kind[1]}": ' if kind else "") + inspect.cleandoc(model.__doc__ or ""))
            for name, info in named(model).items():
                lines.append(f"  {name:<24}{info.description or ''}".rstrip())
        return "\n".join(lines)
    default = (
        "required"
        if field.required
        else f"default {literal(field.default)}"
        if field.default is not None
        else "not set by default"
    )
    lines.append(", ".join(part for part in (field.type, field.limits, default) if part))
    lines.append(field.doc)
    return "\n".join(lines)


def _kinds(word: str) -> list[str]:
    """The tables that a kind such as "gspo" stands for."""
    from omnitrain.recipe.fields import all_fields, named

    found = {field.model: field for field in all_fields() if field.kind and field.kind[1] == word}
    texts = []
    for model, first in found.items():
        lines = [f'{first.kind[0]} = "{word}"', inspect.cleandoc(model.__doc__ or "")]
        texts.append("\n".join(lines + [f"  {name:<24}{info.description or ''}" for name, info in named(model).items()]))
    return texts


def _exit_code(code: int) -> str:
    meanings = {0: "success", 1: "data or run failed, or doctor found a problem"}
    kinds = [name for name, error in _errors().items() if error.exit_code == code and name != "OmnitrainError"]
    if code not in meanings and not kinds:
        codes = sorted({error.exit_code for error in _errors().values()} | {0})
        raise errors.UsageError(f"exit code {code} is not one of omnitrain's: {', '.join(str(c) for c in codes)}")
    lines = [f"exit code {code}" + (f": {meanings[code]}" if code in meanings else "")]
    return "\n".join(lines + [f"  {name:<20}{inspect.cleandoc(_errors()[name].__doc__ or '')}" for name in kinds])


def _errors() -> dict[str, type[errors.OmnitrainError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OmnitrainError)
    }


def _topics() -> list[str]:
    from omnitrain.recipe.fields import all_fields
    from omnitrain.recipe.schema import GATES
    from omnitrain.train.metrics import METRICS

    names = {field.path.replace("[]", "") for field in all_fields()} | {field.name for field in all_fields()}
    kinds = {field.kind[1] for field in all_fields() if field.kind}
    return sorted(names | kinds | set(GATES) | set(METRICS) | set(_errors()))
