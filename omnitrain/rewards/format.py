"""Format: 1 if the whole response follows the template, else 0. Says nothing about the answer."""

import re
from collections.abc import Callable
from typing import Any

_TEMPLATE = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_TAGS = re.compile(r"</?(?:think|answer)>")


def follows_template(response: str) -> bool:
    """Whether it is <think>..</think><answer>..</answer> with space around them at most, each tag once, neither empty."""
    match = _TEMPLATE.fullmatch(response)
    return bool(match) and len(_TAGS.findall(response)) == 4 and all(part.strip() for part in match.groups())


def load(spec: Any) -> Callable[[str, dict], float]:
    """`score(response, row)`, 1.0 or 0.0, for the template or for the regular expression `spec.pattern`."""
    if spec.pattern is None:
        return lambda response, row: float(follows_template(response))
    pattern = re.compile(spec.pattern, re.DOTALL)
    return lambda response, row: float(pattern.fullmatch(response) is not None)
