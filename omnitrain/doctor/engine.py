"""The engine in this environment: a tiny model generates, and the trainer agrees on its log-probs.

As a module (`python -m omnitrain.doctor.engine FOLDER`, under torchrun) it is the rank that does it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from omnitrain.doctor.check import OK, PROBLEM, Check, Finding, first_line, run_python
from omnitrain.launch import environment, visible_accelerators
from omnitrain.rundir import RunDir, read_exit

LOWEST_PEARSON = 0.999


def checks() -> list[Check]:
    """The checks of this file."""
    return [Check("engine", smoke)]


def smoke(timeout: float = 300.0) -> Finding:
    """Generate with a tiny float32 Qwen3-Omni, prompts of every modality, and compare with the trainer."""
    kind = visible_accelerators().kind
    with tempfile.TemporaryDirectory(prefix="omnitrain-doctor-") as folder:
        arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        outcome = run_python([*arguments, "-m", "omnitrain.doctor.engine", folder], timeout=timeout, env=environment(kind))
        run = RunDir(Path(folder) / "run")
        result = run.path / "agreement.json"
        if outcome.code or not result.exists():
            written = read_exit(run) if run.path.exists() else None
            why = first_line(written[1].splitlines()[-1]) if written and written[1] else outcome.reason()
            return Finding("engine", PROBLEM, f"a tiny model cannot be run: {why}", "make install")
        found = json.loads(result.read_text())
    worst = min(found, key=lambda line: line["pearson"])
    detail = f"{worst['engine']}: Pearson with the trainer {worst['pearson']:.6f} at worst ({worst['modality']})"
    if worst["pearson"] < LOWEST_PEARSON:
        return Finding("engine", PROBLEM, detail, "make install")
    return Finding("engine", OK, detail)


def main(folder: Path) -> int:
    """Write the tiny model and a recipe for it into `folder`, then measure as `bench --agreement` does."""
    from omnitrain.evaluation.agreement import agreement_recipe
    from omnitrain.models.qwen3_omni.tiny import write_tiny
    from omnitrain.recipe.loader import validated
    from omnitrain.train import bench

    write_tiny(folder / "model")
    recipe = validated(
        {
            "name": "doctor",
            "model": {"family": "qwen3_omni", "path": str(folder / "model"), "dtype": "float32"},
            "data": {"train": str(folder / "none.parquet"), "max_prompt_tokens": 256},
            "algorithm": {"kind": "gspo"},
            "rollout": {"group_size": 4, "max_new_tokens": 8, "max_concurrent": 16, "gpu_memory_utilization": 0.2},
            "rewards": [{"kind": "choice"}],
            "train": {"prompts_per_step": 1, "learning_rate": 1e-3, "max_steps": 1},
        }
    )
    run = RunDir(folder / "run")
    run.prepare(agreement_recipe(recipe, folder, per_modality=1))
    return bench.main(run.path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
