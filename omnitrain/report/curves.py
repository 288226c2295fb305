"""One metric of several runs side by side: `python -m omnitrain.report.curves METRIC RUN...`."""

import sys
from pathlib import Path

from omnitrain.report.plots import read_metrics


def table(metric: str, runs: list[Path]) -> str:
    """Step by step, the metric of each run; steps at which no run has it are left out.

    Raises:
        FileNotFoundError: a run without metrics.jsonl.
    """
    curves = [{line["step"]: line.get(metric) for line in read_metrics(run / "metrics.jsonl")} for run in runs]
    width = max(10, *(len(run.name) for run in runs))
    lines = [f"{metric}", "step  " + "  ".join(run.name.rjust(width) for run in runs)]
    for step in sorted({step for curve in curves for step, value in curve.items() if value is not None}):
        values = (curve.get(step) for curve in curves)
        lines.append(f"{step:4d}  " + "  ".join(("" if v is None else f"{v:.3f}").rjust(width) for v in values))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1], [Path(name) for name in sys.argv[2:]]))
