"""The offline loop: draw rows, forward, backward, step. No engine and no reward is started."""

from __future__ import annotations

import time
from typing import Any

import torch

from omnitrain import device as devices
from omnitrain.data.sample import Row, Sample
from omnitrain.errors import DataError
from omnitrain.train.context import Clock, Context
from omnitrain.train.health import update_metrics
from omnitrain.train.loop import Loop
from omnitrain.train.objectives import SftObjective
from omnitrain.train.optim import clipped_step
from omnitrain.train.prompts import PromptSource
from omnitrain.train.state import TrainState
from omnitrain.train.updates import plan_updates, run_update

# Log-probs of the model itself, not of a sampling distribution.
TEMPERATURE = 1.0


class OfflineLoop(Loop):
    """Supervised fine-tuning on the rows' own answers."""

    def __init__(self, context: Context, state: TrainState) -> None:
        super().__init__(context, state)
        self.objective = SftObjective()
        for rows in filter(None, (context.train_rows, context.validation_rows)):
            if (row := rows.first_without("chosen", "answer")) is not None:
                raise DataError(f"{rows.path}: row {row} has neither `chosen` nor `answer`; sft has nothing to imitate")

    def step(self) -> None:
        """One step: rows, their targets, the updates, and what the step's number asks for."""
        step, clock, started = self.state.step + 1, Clock(), time.perf_counter()
        spec = self.recipe.train
        with clock.phase("data"):
            rows, skipped = self.source.draw(self.state.sampler, spec.prompts_per_step)
            samples = [self.target(self.source, group, row) for group, row in enumerate(rows)]
        updates = plan_updates(
            samples,
            updates=self.state.updates_per_step,
            units=self.objective.units,
            max_tokens=spec.max_tokens_per_device,
            ranks=self.ranks,
            key=(self.recipe.seed, step),
        )
        self.policy.module.train()
        collected, norms = [], []
        with clock.phase("update"):
            for update in updates:
                collected.append(
                    run_update(self.policy, self.objective, update, self.source.encode, TEMPERATURE, self.ranks.world)
                )
                rate = self.state.scheduler.get_last_lr()[0]  # of this update: the step moves it on
                norms.append(clipped_step(self.state.optimizer, self.state.scheduler, spec.grad_clip))
                self.state.updates += 1
        values: dict[str, Any] = {"step": step, "epoch": self.state.sampler.epoch, "data/overlong_dropped": skipped}
        values |= update_metrics(updates, self.ranks.gather(collected), clock.seconds["update"])
        values |= {
            "train/grad_norm": sum(norms) / len(norms),
            "train/learning_rate": rate,
            "train/updates": self.state.updates,
            "memory/peak_gib": devices.peak_memory_gib(self.ranks.device),
        }
        clock.seconds["step"] = time.perf_counter() - started
        self.state.step = step
        self._finish(values, clock)

    def target(self, source: PromptSource, group: int, index: int) -> Sample:
        """A row's wanted response as a sample: its `chosen`, else its `answer` in the recipe's template, and the end."""
        row: Row = source.rows[index]
        text = row.chosen
        if text is None:
            text = self.recipe.algorithm.template.replace("{answer}", row.answer)
        tokens = self.context.processing.response_ids(text)
        prompt_ids = source.encode(index).ids
        return Sample(index, group, 0, prompt_ids, tokens, [0.0] * len(tokens), "stop", text)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Cross-entropy per target token on the validation rows, by task."""
        samples = [self.target(self.validation, group, row) for group, row in enumerate(self._validation_rows)]
        plan = plan_updates(
            samples,
            updates=1,
            units=self.objective.units,
            max_tokens=self.recipe.train.max_tokens_per_device,
            ranks=self.ranks,
            key=("validation",),
        )
        self.policy.module.eval()
        sums: dict[str, tuple[float, int, int]] = {}
        for batch in plan[0].batches if plan else []:
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
