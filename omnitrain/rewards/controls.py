"""Rewards that teach nothing: a learning curve counts only beside runs that must stay flat."""

import hashlib

from omnitrain.rewards import choice

LETTERS = "ABCD"


def shuffled_choice(response: str, row: dict) -> float:
    """The choice reward against a label drawn from the row's id: as often right by chance, and nothing to learn from."""
    letter = LETTERS[hashlib.sha256(str(row["id"]).encode()).digest()[0] % len(LETTERS)]
    return choice.score(response, row | {"answer": f"<answer>{letter}</answer>"})


def varied(response: str, row: dict) -> float:
    """A number in 0..1 from a hash of the response: different responses differ, and nothing is to be learned."""
    return hashlib.sha256(response.encode()).digest()[0] / 255
