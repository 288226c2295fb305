"""One rank of a measurement: `python -m omnitrain.train.bench RUNDIR`, started by torchrun like a run's worker.

It builds policy and engine as a run does, lets the engine answer the run directory's prompts, asks the policy for the
same tokens' log-probs, and writes RUNDIR/agreement.json. Nothing is trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from omnitrain.launch import run_rank
from omnitrain.rundir import RunDir, write_atomic

RESULT = "agreement.json"
GROUP = 4
TOKENS = 32


def measure(run: RunDir) -> int:
    """Measure and write the result. Returns 0."""
    from omnitrain.train.setup import Run

    with Run(run) as prepared:
        found = _agreement(prepared)
        if prepared.ranks.main:
            write_atomic(run.path / RESULT, json.dumps(found, indent=1))
    return 0


def _agreement(prepared) -> list[dict[str, Any]]:
    """One dict per modality: dtype, modality, tokens, engine, and the numbers of `algorithms.agreement`."""
    from omnitrain.rollout import build_engine
    from omnitrain.rollout.engine import Sampling
    from omnitrain.train.context import Clock
    from omnitrain.train.health import compare, old_logprobs
    from omnitrain.train.prompts import PromptSource
    from omnitrain.train.rollouts import Rollouts
    from omnitrain.train.updates import plan_updates, score_batches

    recipe, context, ranks = prepared.recipe, prepared.context, prepared.ranks
    engine = build_engine(recipe, ranks=ranks, policy=context.policy, processing=context.processing)
    try:
        rollouts = Rollouts(context, engine, prepared.scorer)
        rollouts.sync(Clock())
        source = PromptSource(context.train_rows, context.processing, ranks, recipe.data.overlong)
        rows = source.fitting(list(range(len(context.train_rows))))
        temperature = recipe.rollout.temperature
        sampling = Sampling(GROUP, temperature, min(TOKENS, recipe.rollout.max_new_tokens))
        samples = rollouts.sample(source, rows, ("agreement",), sampling, Clock(), score=False)
        engine.sleep()
        limit = recipe.train.max_tokens_per_device
        updates = plan_updates(samples, updates=1, units=len, max_tokens=limit, ranks=ranks, key=("agreement",))
        score_batches(context.policy, updates, source.encode, temperature)
        trained = {key: values for share in ranks.gather(old_logprobs(updates)) for key, values in share.items()}
    finally:
        engine.close()
    by_modality: dict[str, list] = {}
    for sample in samples:
        by_modality.setdefault(source.rows[sample.row].source, []).append(sample)
    facts = {"dtype": recipe.model.dtype, "engine": engine.name, "ranks": ranks.world}
    return [
        facts | {"modality": name, "tokens": sum(len(s.tokens) for s in share)} | compare(share, trained)
        for name, share in by_modality.items()
    ]


def main(path: Path) -> int:
    """Run this rank to its end; returns the exit code."""
    return run_rank(RunDir(path), measure)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
