"""Multiple choice: 1 if the response's single <answer>X</answer> is the label, else 0."""

import re

_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)


def _tagged(text: str) -> set[str]:
    """The different contents of the answer tags, without surrounding space, dots and parentheses, in upper case."""
    return {content.strip().strip(".()").strip().upper() for content in _TAG.findall(text)}


def score(response: str, row: dict) -> float:
    """1.0 or 0.0. The label `row["answer"]` is `<answer>X</answer>`, as published.

    A response without a tag, or with several different ones, gets 0: naming every letter must not pay. The same
    tag twice is one answer. Raises ValueError when the label holds no tag, or several different ones.
    """
    label = _tagged(row["answer"] or "")
    if len(label) != 1 or "" in label:
        raise ValueError(f"the label {row['answer']!r} must hold one <answer>X</answer>")
    return float(_tagged(response) == label)
