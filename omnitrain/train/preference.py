"""Offline preference training (DPO): pairs of given responses, chosen and rejected, against a reference."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
from torch import Tensor

from omnitrain.data.files import RowFiles
from omnitrain.data.sample import Prompt, Row, Sample
from omnitrain.errors import DataError
from omnitrain.evaluation.preference import MEASURES, summarise_pairs
from omnitrain.train.context import Context
from omnitrain.train.objectives import Batch
from omnitrain.train.offline import TEMPERATURE, OfflineLoop
from omnitrain.train.prompts import PromptSource
from omnitrain.train.reference import ReferenceSums, load_reference
from omnitrain.train.state import TrainState
from omnitrain.train.updates import MicroBatch, Update, UpdateStats

_METRICS = dict(zip(MEASURES, ("dpo_accuracy", "dpo_margin", "chosen_reward", "rejected_reward")))


class PreferenceLoop(OfflineLoop):
    """DPO. Both responses of a row go through the model in one micro-batch; a pair is one unit of the loss."""

    together = True
    limits = "data.max_prompt_tokens, data.max_response_tokens and, for the pair, train.max_tokens_per_device"

    def __init__(self, context: Context, state: TrainState) -> None:
        super().__init__(context, state)
        ties = len(context.train_rows.ties())
        self.facts = {"data/ties": ties}
        if ties:
            context.console.say(
                f"{ties} of {len(context.train_rows)} pairs are left out: chosen and rejected are equal"
            )
        self.reference: ReferenceSums | None = None
        if self.recipe.algorithm.reference == "precomputed":
            self.reference = load_reference(self)

    @staticmethod
    def check(rows: RowFiles) -> None:
        """Raises DataError for a row without one of the two responses, and for rows that are all ties."""
        for column in ("chosen", "rejected"):
            if (row := rows.first_without(column)) is not None:
                raise DataError(
                    f"{row} has no `{column}` response; dpo needs rows with both: prepare preference data, or leave "
                    "such rows out"
                )
        if len(rows.ties()) == len(rows):
            raise DataError(f"{rows.path}: chosen and rejected are the same text in every row; there is nothing to prefer")

    def responses(self, row: Row) -> list[str]:
        """The chosen response and the rejected one."""
        return [row.chosen, row.rejected]

    # -- rows to samples

    def _prompts(self, rows: RowFiles) -> PromptSource:
        source = super()._prompts(rows)
        source.leave_out(rows.ties())
        return source

    def _misfit(self, prompt: Prompt) -> str | None:
        if why := super()._misfit(prompt):
            return why
        limit = self.recipe.train.max_tokens_per_device
        pair = sum(len(prompt.ids) + len(ids) for ids in self._response_ids(prompt.row))
        if pair > limit:
            return (
                f"row {prompt.row.id!r}: the prompt with each of its two responses has {pair} tokens together, "
                f"train.max_tokens_per_device is {limit}"
            )
        return None

    def samples(self, source: PromptSource, rows: list[int]) -> list[Sample]:
        """The rows' pairs, chosen then rejected, with the reference's log-probs where they were precomputed."""
        found = super().samples(source, rows)
        if self.reference:
            self.reference.fill(found, source)
        return found

    # -- metrics

    def update_metrics(
        self, updates: list[Update], shares: list[list[UpdateStats]], seconds: float
    ) -> dict[str, float]:
        """What to log of a step's updates, and what DPO says of their pairs, each before its update."""
        sums: Counter = Counter()
        for stats in (stats for share in shares for stats in share):
            sums.update(stats.sums)
        values = super().update_metrics(updates, shares, seconds)
        return values | {f"train/{name}": sums[f"{key}_sum"] / sums["units"] for key, name in _METRICS.items()}

    def _validate(self) -> dict[str, float]:
        sums: dict[str, Counter] = {}
        for batch in self._passes(self.samples(self.validation, self._validation_rows)):
            losses, measures = self._pairs(batch)
            for number, sample in enumerate(() if batch.filler else batch.samples[::2]):
                found = {"loss": losses[number].item(), "rows": 1}
                found |= {name: measures[name][number].item() for name in MEASURES}
                sums.setdefault(self.validation.rows[sample.row].modality, Counter()).update(found)
        return summarise_pairs(self.ranks.gather(sums))

    def _pairs(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and measures, (P,) each, of one micro-batch. Collective."""
        inputs = batch.inputs(self.validation.encode)
        reference = None
        if self.objective.needs_reference:
            with self.policy.reference():
                reference = self.policy.logprobs(inputs, TEMPERATURE)[0]
        logp, _ = self.policy.logprobs(inputs, TEMPERATURE)
        lengths = torch.tensor([len(s.tokens) for s in batch.samples], device=logp.device)
        sums = batch.reference_sums(logp.device)
        return self.objective.pairs(
            logp, Batch(lengths, logp.new_zeros(len(lengths)), reference=reference, reference_sums=sums)
        )

    def reference_policy(self):
        """A context in which the policy is the reference. Without an adapter it is one before step 1, as it stands."""
        return self.policy.reference() if self.recipe.model.lora else nullcontext()
