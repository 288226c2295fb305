"""From a run directory to a running loop: the parts are built here, in the order their memory and processes need."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from omnitrain import device as devices
from omnitrain.data.schema import RowFile
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.report.plots import write_plots
from omnitrain.rewards.scorer import Scorer, default_workers
from omnitrain.rollout import build_engine
from omnitrain.rundir import RunDir
from omnitrain.train.checkpoint import Checkpointer, load_trainable
from omnitrain.train.console import Console
from omnitrain.train.context import Context
from omnitrain.train.distributed import Ranks, init_ranks
from omnitrain.train.gates import Gates
from omnitrain.train.metrics import MetricsFile
from omnitrain.train.offline import OfflineLoop
from omnitrain.train.online import OnlineLoop
from omnitrain.train.rollouts import Rollouts
from omnitrain.train.state import TrainState
from omnitrain.train.trackers import build_sinks


class Run:
    """A run's parts on one rank. Use as a context manager: engine, rewards and files are closed at its end."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.recipe = run.recipe()
        self._closing: list = []

    def __enter__(self) -> "Run":
        recipe = self.recipe
        # Before anything touches a device: reward workers are spawned processes.
        world = int(os.environ.get("WORLD_SIZE", 1))
        self.scorer = None
        if recipe.algorithm.online:
            log = self.run.logs / f"rewards_{os.environ.get('RANK', 0)}.log"
            self.scorer = Scorer(recipe.rewards, default_workers(world), log=log, wait=False)
        if self.scorer:
            self._closing.append(self.scorer.close)
        tensor_parallel = getattr(recipe.rollout, "tensor_parallel", 1)
        self.ranks = init_ranks(tensor_parallel)
        devices.seed_all(recipe.seed)
        self.context = self._context(self.ranks)
        return self

    def _context(self, ranks: Ranks) -> Context:
        recipe, run = self.recipe, self.run
        console = Console(quiet=not ranks.main)
        train_rows = RowFile(recipe.data.train)
        validation_rows = RowFile(recipe.data.validation) if recipe.data.validation else None
        console.say(
            f"{recipe.name}: {len(train_rows)} rows, {ranks.world} ranks on {ranks.device.type}, {recipe.model.dtype}"
        )
        processing = Processing(
            recipe.model.path, system=recipe.data.system, max_prompt_tokens=recipe.data.max_prompt_tokens
        )
        policy = ThinkerPolicy(
            recipe.model,
            mesh=ranks.mesh,
            device=ranks.device,
            seed=recipe.seed,
            gradient_checkpointing=recipe.train.gradient_checkpointing,
        )
        if recipe.model.init_from:
            load_trainable(Path(recipe.model.init_from), policy.module)
            console.say(f"starting weights from {recipe.model.init_from}")
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
        try:
            if self.recipe.algorithm.online:
                self._online(state).run()
            else:
                OfflineLoop(context, state).run()
        finally:
            if self.ranks.main and self.run.metrics.exists():
                write_plots(self.run.metrics, self.run.plots)

    def _online(self, state: TrainState) -> OnlineLoop:
        context = self.context
        engine = build_engine(self.recipe, ranks=self.ranks, policy=context.policy, processing=context.processing)
        self._closing.append(engine.close)
        rollouts = Rollouts(context, engine, self.scorer)
        loop = OnlineLoop(context, rollouts, state)
        if state.step < state.total_steps:
            Gates(context, rollouts, loop).run()
        return loop

    def __exit__(self, *error) -> None:
        for close in reversed(self._closing):
            close()
        if dist.is_initialized() and error[0] is None:
            dist.destroy_process_group()
