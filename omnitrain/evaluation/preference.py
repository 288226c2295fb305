"""Preference validation: how well given pairs are told apart, by modality and over all."""

from __future__ import annotations

from collections import Counter

MEASURES = ("accuracy", "margin", "chosen_reward", "rejected_reward")
"""What DPO says of a pair, beside its loss."""


def summarise_pairs(shares: list[dict[str, Counter]]) -> dict[str, float]:
    """val/<modality>/{loss,accuracy,margin,chosen_reward,rejected_reward,rows} and the same for val/all.

    shares: every rank's sums over its pairs by modality: of the loss, of each measure, and of the rows.
    """
    sums: dict[str, Counter] = {}
    for share in shares:
        for modality, found in share.items():
            sums.setdefault(modality, Counter()).update(found)
            sums.setdefault("all", Counter()).update(found)
    values: dict[str, float] = {}
    for modality, found in sorted(sums.items()):
        rows = found["rows"]
        values |= {f"val/{modality}/{name}": found[name] / rows for name in ("loss", *MEASURES)}
        values[f"val/{modality}/rows"] = rows
    return values
