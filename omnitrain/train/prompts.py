"""Which rows a step trains on, and their prompts."""

from __future__ import annotations

from omnitrain.data.sample import Prompt
from omnitrain.data.sampler import PromptSampler
from omnitrain.data.schema import RowFile
from omnitrain.errors import DataError
from omnitrain.models.qwen3_omni.processing import OverlongPrompt, Processing
from omnitrain.train.distributed import Ranks


class PromptSource:
    """Rows of one file as prompts, those too long left out."""

    def __init__(self, rows: RowFile, processing: Processing, ranks: Ranks, overlong: str) -> None:
        self.rows = rows
        self._processing = processing
        self._ranks = ranks
        self._overlong = overlong
        self._refused: set[int] = set()

    def encode(self, index: int) -> Prompt:
        """The prompt of one row."""
        return self._processing.encode(self.rows[index])

    def fitting(self, indices: list[int]) -> list[int]:
        """Those of `indices` whose prompt fits, in order. Each rank encodes its share and all learn the result.

        Raises:
            DataError: a prompt is too long and `data.overlong` is "error".
        """
        refused = []
        for index in indices[self._ranks.rank :: self._ranks.world]:
            try:
                self.encode(index)
            except OverlongPrompt as error:
                refused.append((index, str(error)))
        refused = [pair for share in self._ranks.gather(refused) for pair in share]
        if refused and self._overlong == "error":
            raise DataError(
                f"{refused[0][1]}; {len(refused)} such rows here; raise data.max_prompt_tokens or drop them"
            )
        self._refused.update(index for index, _ in refused)
        return [index for index in indices if index not in self._refused]

    def first(self, limit: int | None) -> list[int]:
        """Those of the file's first `limit` rows (all without one) whose prompt fits.

        Raises:
            DataError: none of them fits.
        """
        asked = list(range(min(limit or len(self.rows), len(self.rows))))
        fitting = self.fitting(asked)
        if not fitting:
            raise DataError(
                f"none of the {len(asked)} rows of {self.rows.path} fits into data.max_prompt_tokens; raise it"
            )
        return fitting

    def draw(self, sampler: PromptSampler, count: int) -> tuple[list[int], int]:
        """The next `count` rows that fit, and how many were skipped on the way.

        Raises:
            DataError: no row of the file fits.
        """
        drawn: list[int] = []
        skipped = 0
        while len(drawn) < count:
            asked = sampler.take(count - len(drawn))
            fitting = self.fitting(asked)
            skipped += len(asked) - len(fitting)
            drawn += fitting
            if len(self._refused) >= len(self.rows):
                raise DataError(f"every row of {self.rows.path} is longer than data.max_prompt_tokens")
        return drawn, skipped
