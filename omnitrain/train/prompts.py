"""Which rows a step trains on, and their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omnitrain.data.files import RowFiles
from omnitrain.data.sample import Prompt
from omnitrain.data.sampler import Stream
from omnitrain.errors import DataError
from omnitrain.models.qwen3_omni.processing import OverlongPrompt, Processing
from omnitrain.train.distributed import Ranks


class PromptSource:
    """Rows as prompts, those too long left out.

    misfit: says why a row whose prompt fits cannot be trained on all the same (its responses are too long), or None.
    limits: the recipe's fields that a row must fit into, for messages.
    """

    def __init__(
        self,
        rows: RowFiles,
        processing: Processing,
        ranks: Ranks,
        overlong: str,
        *,
        misfit: Callable[[Prompt], str | None] = lambda prompt: None,
        limits: str = "data.max_prompt_tokens",
    ) -> None:
        self.rows = rows
        self._processing = processing
        self._ranks = ranks
        self._overlong = overlong
        self._misfit = misfit
        self.limits = limits
        self._refused: set[int] = set()

    def encode(self, index: int) -> Prompt:
        """The prompt of one row."""
        return self._processing.encode(self.rows[index])

    def leave_out(self, indices: Iterable[int]) -> None:
        """Never give these rows. They do not count as overlong."""
        self._refused.update(indices)

    def fitting(self, indices: list[int]) -> list[int]:
        """Those of `indices` that fit, in order. Each rank encodes its share and all learn the result.

        Raises:
            DataError: a row is too long and `data.overlong` is "error".
        """
        refused = []
        for index in indices[self._ranks.rank :: self._ranks.world]:
            try:
                why = None if index in self._refused else self._misfit(self.encode(index))
            except OverlongPrompt as error:
                why = str(error)
            if why:
                refused.append((index, why))
        refused = [pair for share in self._ranks.gather(refused) for pair in share]
        if refused and self._overlong == "error":
            raise DataError(f"{refused[0][1]}; {len(refused)} such rows here; raise {self.limits} or drop them")
        self._refused.update(index for index, _ in refused)
        return [index for index in indices if index not in self._refused]

    def first(self, limit: int | None, balance: str = "none") -> list[int]:
        """Those of the first `limit` rows (all without one) that fit.

        balance: "modality" takes as many rows of each modality; of one with fewer, all it has.

        Raises:
            DataError: none of them fits.
        """
        asked = list(range(min(limit or len(self.rows), len(self.rows))))
        if balance == "modality" and limit:
            asked = first_of_each(self.rows.modalities, limit)
        fitting = self.fitting(asked)
        if not fitting:
            raise DataError(f"none of the {len(asked)} rows of {self.rows.path} fits into {self.limits}; raise it")
        return fitting

    def draw(self, sampler: Stream, count: int) -> tuple[list[int], int]:
        """The next `count` rows that fit, and how many were skipped on the way.

        Raises:
            DataError: no row that the sampler could give fits.
        """
        drawn: list[int] = []
        skipped = 0
        sampler.begin()
        while len(drawn) < count:
            asked = sampler.take(count - len(drawn))
            fitting = self.fitting(asked)
            skipped += len(asked) - len(fitting)
            drawn += fitting
            if len(fitting) < len(asked) and all(row in self._refused for row in sampler.pool):
                kind = f" {sampler.modality}" if hasattr(sampler, "modality") else ""
                raise DataError(f"every{kind} row of {self.rows.path} is longer than {self.limits}")
        return drawn, skipped


def first_of_each(labels: list[str], limit: int) -> list[int]:
    """Positions of the first rows of each label, in order: `limit` // labels of each, all where there are fewer.

    Raises:
        DataError: `limit` is below the number of labels.
    """
    kinds = sorted(set(labels))
    if limit < len(kinds):
        raise DataError(
            f"validate.max_rows = {limit} is less than one row for each modality ({', '.join(kinds)}); "
            f"set it to {len(kinds)} or more"
        )
    left = dict.fromkeys(kinds, limit // len(kinds))
    chosen = []
    for index, label in enumerate(labels):
        if left[label]:
            left[label] -= 1
            chosen.append(index)
    return chosen
