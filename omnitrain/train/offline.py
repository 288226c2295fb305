"""The offline loops' frame, and supervised fine-tuning: draw rows, forward, backward, step.

The responses are the rows' own, so no engine and no reward is started.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from omnitrain import device as devices
from omnitrain.data.files import RowFiles
from omnitrain.data.sample import Prompt, Row, Sample
from omnitrain.errors import DataError
from omnitrain.train.context import Clock, Context
from omnitrain.train.health import update_metrics
from omnitrain.train.loop import Loop
from omnitrain.train.objectives import build_objective
from omnitrain.train.prompts import PromptSource
from omnitrain.train.state import TrainState
from omnitrain.train.updates import MicroBatch, Update, UpdateStats, plan_updates

# Log-probs of the model itself, not of a sampling distribution.
TEMPERATURE = 1.0


class OfflineLoop(Loop):
    """Steps on the rows' own responses; a subclass says which these are and what a validation is."""

    together = False
    """Whether the responses of a row stay in one micro-batch."""
    limits = "data.max_prompt_tokens and data.max_response_tokens"
    """What a row must fit into, for messages."""

    def __init__(self, context: Context, state: TrainState) -> None:
        self.objective = build_objective(context.recipe)
        super().__init__(context, state)

    @staticmethod
    def check(rows: RowFiles) -> None:
        """Raises DataError for a row that has nothing to train on."""
        raise AssertionError("a subclass's")

    def responses(self, row: Row) -> list[str]:
        """The texts that a row is trained on."""
        raise AssertionError("a subclass's")

    # -- rows to samples

    def _prompts(self, rows: RowFiles) -> PromptSource:
        overlong = self.recipe.data.overlong
        return PromptSource(
            rows, self.context.processing, self.ranks, overlong, misfit=self._misfit, limits=self.limits
        )

    def _misfit(self, prompt: Prompt) -> str | None:
        """Why a row whose prompt fits is too long all the same, or None. A response is never cut."""
        limit = self.recipe.data.max_response_tokens
        longest = max(map(len, self._response_ids(prompt.row))) if limit else 0
        if limit and longest > limit:
            return f"row {prompt.row.id!r}: a response has {longest} tokens, data.max_response_tokens is {limit}"
        return None

    def _response_ids(self, row: Row) -> list[list[int]]:
        return [self.context.processing.response_ids(text) for text in self.responses(row)]

    def samples(self, source: PromptSource, rows: list[int]) -> list[Sample]:
        """The rows' responses as samples; a row's place in the list is its group."""
        found = []
        for group, index in enumerate(rows):
            prompt = source.encode(index)
            for child, (text, ids) in enumerate(zip(self.responses(prompt.row), self._response_ids(prompt.row))):
                found.append(Sample(index, group, child, prompt.ids, ids, [0.0] * len(ids), "stop", text))
        return found

    # -- the step

    def step(self) -> None:
        """One step: rows, their responses, the updates, and what the step's number asks for."""
        step, clock, started = self.state.step + 1, Clock(), time.perf_counter()
        spec = self.recipe.train
        with clock.phase("data"):
            rows, skipped = self.source.draw(self.state.sampler, spec.prompts_per_step)
            samples = self.samples(self.source, rows)
        updates = plan_updates(
            samples,
            updates=self.state.updates_per_step,
            units=self.objective.units,
            max_tokens=spec.max_tokens_per_device,
            ranks=self.ranks,
            key=(self.recipe.seed, step),
            together=self.together,
        )
        self.context.console.begin(f"step {step}")
        with clock.phase("update"):
            collected, stepped = self._train_on(updates, TEMPERATURE)
        values: dict[str, Any] = {"step": step, "epoch": self.state.sampler.epoch, "data/overlong_dropped": skipped}
        values |= self.facts
        values |= self.update_metrics(updates, self.ranks.gather(collected), clock.seconds["update"]) | stepped
        values["memory/peak_gib"] = devices.peak_memory_gib(self.ranks.device)
        clock.seconds["step"] = time.perf_counter() - started
        self.state.step = step
        self._finish(values, clock)

    def update_metrics(
        self, updates: list[Update], shares: list[list[UpdateStats]], seconds: float
    ) -> dict[str, float]:
        """What to log of a step's updates; `shares` holds every rank's statistics."""
        return update_metrics(updates, shares, seconds)

    # -- validation

    def validate(self) -> dict[str, float]:
        """Metrics of the validation rows, under the averaged weights where there are such."""
        self.policy.module.eval()
        with self.state.ema.swapped() if self.state.ema else nullcontext(), torch.no_grad():
            return self._validate()

    def _validate(self) -> dict[str, float]:
        raise AssertionError("a subclass's")

    def _passes(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches of a pass without a backward over samples of all ranks."""
        plan = plan_updates(
            samples,
            updates=1,
            units=self.objective.units,
            max_tokens=self.recipe.train.max_tokens_per_device,
            ranks=self.ranks,
            key=("validation",),
            together=self.together,
        )
        return plan[0].batches if plan else []


class SftLoop(OfflineLoop):
    """Supervised fine-tuning on the rows' own answers."""

    @staticmethod
    def check(rows: RowFiles) -> None:
        """Raises DataError for a row without a response to imitate."""
        if (row := rows.first_without("chosen", "answer")) is not None:
            raise DataError(f"{row} has neither `chosen` nor `answer`; sft has nothing to imitate")

    def responses(self, row: Row) -> list[str]:
        """A row's wanted response: its `chosen`, else its `answer` in the recipe's template."""
        if row.chosen is not None:
            return [row.chosen]
        return [self.recipe.algorithm.template.replace("{answer}", row.answer)]

    def _validate(self) -> dict[str, float]:
        """Cross-entropy per target token on the validation rows, by task."""
        sums: dict[str, tuple[float, int, int]] = {}
        for batch in self._passes(self.samples(self.validation, self._validation_rows)):
            logp, _ = self.policy.logprobs(batch.inputs(self.validation.encode), TEMPERATURE)
            if batch.filler:
                continue
            for sample, part in zip(batch.samples, logp.split([len(s.tokens) for s in batch.samples])):
                task = self.validation.rows[sample.row].source
                loss, tokens, rows = sums.get(task, (0.0, 0, 0))
                sums[task] = (loss - part.sum().item(), tokens + len(part), rows + 1)
        values: dict[str, float] = {}
        shares = self.ranks.gather(sums)
        for task in sorted({task for share in shares for task in share}):
            loss, tokens, rows = (sum(share.get(task, (0.0, 0, 0))[i] for share in shares) for i in range(3))
            values |= {f"val/{task}/loss": loss / tokens, f"val/{task}/rows": rows}
        return values
