"""From a run directory to a running loop: the parts are built here, in the order their memory and processes need."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import torch.distributed as dist

from omnitrain import device as devices
from omnitrain.data.files import RowFiles
from omnitrain.errors import Interrupted, UsageError
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.recipe.schema import Recipe
from omnitrain.report.plots import write_plots
from omnitrain.rewards.scorer import Scorer, default_workers
from omnitrain.rollout import build_engine
from omnitrain.rollout.engine import RolloutEngine
from omnitrain.rundir import RunDir
from omnitrain.train.adapter import start_adapter
from omnitrain.train.checkpoint import Checkpointer, load_trainable
from omnitrain.train.console import Console
from omnitrain.train.context import Context
from omnitrain.train.distributed import Ranks, init_ranks
from omnitrain.train.metrics import METRICS, MetricsFile, family
from omnitrain.train.offline import OfflineLoop, SftLoop
from omnitrain.train.offline_gates import OfflineGates
from omnitrain.train.online import OnlineLoop
from omnitrain.train.online_gates import OnlineGates
from omnitrain.train.preference import PreferenceLoop
from omnitrain.train.rollouts import Rollouts
from omnitrain.train.state import TrainState
from omnitrain.train.trackers import build_sinks

OFFLINE = {"sft": SftLoop, "dpo": PreferenceLoop}


class Run:
    """A run's parts on one rank. Use as a context manager: engine, rewards and files are closed at its end."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.recipe = run.recipe()
        self._closing: list = []
        self._engine: RolloutEngine | None = None

    def __enter__(self) -> "Run":
        recipe = self.recipe
        # Before anything touches a device: reward workers are spawned processes.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
        self.scorer = None
        if recipe.algorithm.online:
            log = self.run.logs / f"rewards_{os.environ.get('RANK', 0)}.log"
            self.scorer = Scorer(recipe.rewards, default_workers(here), log=log, wait=False)
        if self.scorer:
            self._closing.append(self.scorer.close)
        tensor_parallel = getattr(recipe.rollout, "tensor_parallel", 1)
        self.ranks = init_ranks(tensor_parallel)
        devices.seed_all(recipe.seed)
        if recipe.deterministic:
            devices.set_deterministic()
        self.context = self._context(self.ranks)
        return self

    def _context(self, ranks: Ranks) -> Context:
        recipe, run = self.recipe, self.run
        _check_best(recipe)
        console = Console(quiet=not ranks.main)
        train_rows = RowFiles([file.path for file in recipe.data.train_files])
        validation_rows = RowFiles(recipe.data.validation_files) if recipe.data.validation_files else None
        count = "1 rank" if ranks.world == 1 else f"{ranks.world} ranks"
        console.say(f"{recipe.name}: {len(train_rows)} rows, {count} on {ranks.device.type}, {recipe.model.dtype}")
        if not recipe.algorithm.online:
            for rows in filter(None, (train_rows, validation_rows)):
                OFFLINE[recipe.algorithm.kind].check(rows)
        if self.scorer:
            self.scorer.check_sources({**train_rows.sources, **(validation_rows.sources if validation_rows else {})})
            self.scorer.wait_ready()
        console.say("loading the policy")
        processing = Processing(
            recipe.model.path,
            system=recipe.data.system,
            max_prompt_tokens=recipe.data.max_prompt_tokens,
            image=recipe.data.image,
            video=recipe.data.video,
            use_audio_in_video=recipe.data.use_audio_in_video,
        )
        policy = ThinkerPolicy(
            recipe.model,
            mesh=ranks.mesh,
            device=ranks.device,
            seed=recipe.seed,
            gradient_checkpointing=recipe.train.gradient_checkpointing,
        )
        if recipe.model.init_from and not ranks.broadcast(run.resumes() if ranks.main else None):
            load_trainable(Path(recipe.model.init_from), policy.module)
            console.say(f"starting weights from {recipe.model.init_from}")
        if recipe.model.adapter:
            start_adapter(recipe, run, policy, ranks, console.say)
        metrics = sinks = None
        if ranks.main:
            metrics, sinks = MetricsFile(run.metrics), build_sinks(recipe, run.path)
            self._closing += [metrics.close, sinks.close]
        best = recipe.checkpoint.keep_best
        checkpointer = Checkpointer(
            run.checkpoints,
            keep_last=recipe.checkpoint.keep_last,
            keep_best=(best.metric, best.mode) if best else None,
            say=console.say,
        )
        return Context(
            recipe, run, ranks, policy, processing, train_rows, validation_rows, checkpointer, console, metrics, sinks
        )

    def train(self) -> None:
        """Resume if there is a checkpoint, run the gates, run the loop, draw the plots."""
        context = self.context
        state = TrainState(context)
        state.resume(context)
        context.console.total_steps = state.total_steps
        if state.step >= state.total_steps:
            context.console.say(f"finished already: {state.step} of {state.total_steps} steps")
            return
        context.check_start(state.step + 1)
        try:
            loop = self._online(state) if self.recipe.algorithm.online else self._offline(state)
            loop.run()
        finally:
            if self.ranks.main:
                self._plots()

    def _online(self, state: TrainState) -> OnlineLoop:
        context = self.context
        self.scorer.check()
        context.console.say(f"starting {self.recipe.rollout.engine}, the rollout engine")
        engine = build_engine(self.recipe, ranks=self.ranks, policy=context.policy, processing=context.processing)
        self._engine = engine
        context.check_start(state.step + 1)
        rollouts = Rollouts(context, engine, self.scorer)
        loop = OnlineLoop(context, rollouts, state)
        OnlineGates(context, rollouts, loop).run()
        context.check_start(state.step + 1)
        return loop

    def _offline(self, state: TrainState) -> OfflineLoop:
        loop = OFFLINE[self.recipe.algorithm.kind](self.context, state)
        OfflineGates(self.context, loop).run()
        self.context.check_start(state.step + 1)
        return loop

    def __exit__(self, kind, error, traceback) -> None:
        # After a failure engine and process group are left to the process's end: closing them may wait for ranks
        # that are gone, or for a device that no longer answers.
        ended_well = error is None or isinstance(error, Interrupted)
        if ended_well and self._engine:
            self._engine.close()
        for close in reversed(self._closing):
            close()
        if dist.is_initialized() and ended_well:
            dist.destroy_process_group()

    def _plots(self) -> None:
        try:
            write_plots(self.run.metrics, self.run.plots)
        except OSError as error:  # they can be drawn again, and must not hide why a run ended
            self.context.console.say(f"warning: no plots: {error}")


def _check_best(recipe: Recipe) -> None:
    """A metric that is never written would keep no checkpoint, without a word."""
    best = recipe.checkpoint.keep_best
    if best is None:
        return
    if family(best.metric) not in METRICS:
        close = difflib.get_close_matches(best.metric, METRICS, 1)
        hint = f"; did you mean {close[0]}?" if close else "; docs/metrics.md lists them"
        raise UsageError(f"checkpoint.keep_best.metric: {best.metric} is no metric of a run{hint}")
    if best.metric.startswith("val/") and recipe.data.validation is None:
        raise UsageError(f"checkpoint.keep_best.metric = {best.metric} needs data.validation")
