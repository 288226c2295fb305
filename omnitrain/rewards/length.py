"""Soft overlong penalty (DAPO, arXiv 2503.14476, equation 13): 0 up to limit - buffer tokens, -1 from limit on."""

from collections.abc import Callable
from typing import Any


def penalty(tokens: int, limit: int, buffer: int) -> float:
    """min(0, (limit - buffer - tokens) / buffer), not below -1. All in tokens; `buffer` >= 1."""
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))


def load(spec: Any) -> Callable[[str, dict], float]:
    """`score(response, row)` in [-1, 0]; `row` holds response_tokens and max_new_tokens, the default limit."""

    def score(response: str, row: dict) -> float:
        return penalty(row["response_tokens"], spec.limit or row["max_new_tokens"], spec.buffer)

    return score
