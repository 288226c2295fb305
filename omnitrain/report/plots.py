"""Pictures of a run, drawn from metrics.jsonl alone: plots/*.png."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A phase that METRICS gives a time of its own but that is no part of time/step.
_NOT_PHASES = ("time/step", "time/overhead_share", "time/validate", "time/checkpoint")


@dataclass(frozen=True)
class Series:
    """The values of one metric: steps and values of equal length, lines without it left out."""

    name: str
    steps: list[int]
    values: list[float]


def write_plots(metrics: Path, out: Path) -> list[Path]:
    """Draw a run's metrics.jsonl into the directory `out` and return the files written.

    A picture none of whose metrics has a number is not drawn. A half-written last line is ignored.
    Raises FileNotFoundError when there is no such file.
    """
    lines = read_metrics(metrics)
    out.mkdir(parents=True, exist_ok=True)
    return [path for name, draw in PICTURES.items() if (path := _picture(name, draw, lines, out))]


def read_metrics(path: Path) -> list[dict]:
    """The objects of a metrics.jsonl in order; where a step was written twice, its later line counts."""
    by_step: dict[int, dict] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) - 1:
                break  # the run is being written, or was killed in the middle of a line
            raise
        by_step.setdefault(values["step"], {}).update(values)
    return [by_step[step] for step in sorted(by_step)]


def series(lines: list[dict], name: str) -> Series:
    """One metric over the steps that have a number for it."""
    points = [(v["step"], v[name]) for v in lines if isinstance(v.get(name), int | float)]
    return Series(name, [step for step, _ in points], [value for _, value in points])


def _names(lines: list[dict], wanted: Callable[[str], bool]) -> list[str]:
    return sorted({name for values in lines for name in values if wanted(name)})


def _lines(axis, lines: list[dict], names: list[str], *, log: bool = False, marker: str | None = None) -> bool:
    """Draw the named metrics into one axis; False when there was nothing to draw."""
    drawn = [s for s in (series(lines, name) for name in names) if s.steps]
    for s in drawn:
        single = "o" if len(s.steps) == 1 else marker
        axis.plot(s.steps, s.values, label=s.name, marker=single, markersize=3, linewidth=1.2)
    if log and any(value > 0 for s in drawn for value in s.values):
        # A difference of exactly 0 has no logarithm and is the best there is: draw it on the floor.
        floor = min(value for s in drawn for value in s.values if value > 0)
        axis.set_yscale("symlog", linthresh=floor)
    if drawn:
        axis.legend(fontsize=7)
    return bool(drawn)


def _reward(figure, lines):
    axis = figure.subplots()
    mean, std = series(lines, "train/reward_mean"), series(lines, "train/reward_std")
    spread = dict(zip(std.steps, std.values, strict=True))
    if all(step in spread for step in mean.steps):
        low = [value - spread[step] for step, value in zip(mean.steps, mean.values, strict=True)]
        high = [value + spread[step] for step, value in zip(mean.steps, mean.values, strict=True)]
        axis.fill_between(mean.steps, low, high, alpha=0.15, linewidth=0)
    trained = _lines(axis, lines, ["train/reward_mean"])
    validated = _lines(
        axis, lines, _names(lines, lambda n: n.startswith("val/") and n.endswith(("/reward", "/accuracy"))), marker="o"
    )
    return trained or validated


def _loss(figure, lines):
    axis = figure.subplots()
    trained = _lines(axis, lines, ["train/loss", "train/kl"])
    validated = _lines(axis, lines, _names(lines, lambda n: n.startswith("val/") and n.endswith("/loss")), marker="o")
    return trained or validated


def _agreement(figure, lines):
    top, bottom = figure.subplots(2, 1, sharex=True)
    pearson = _lines(top, lines, ["rollout/pearson"])
    differences = _lines(bottom, lines, ["rollout/logp_diff_mean", "rollout/logp_diff_max", "rollout/k3"], log=True)
    return pearson or differences


def _ratio(figure, lines):
    top, bottom = figure.subplots(2, 1, sharex=True)
    ratio = _lines(top, lines, ["train/ratio_mean", "train/ratio_max"])
    clips = _lines(bottom, lines, ["train/clip_low_fraction", "train/clip_high_fraction"])
    return ratio or clips


def _gradient(figure, lines):
    top, bottom = figure.subplots(2, 1, sharex=True)
    norm = _lines(top, lines, ["train/grad_norm"])
    rate = _lines(bottom, lines, ["train/learning_rate"])
    return norm or rate


def _exploration(figure, lines):
    top, bottom = figure.subplots(2, 1, sharex=True)
    entropy = _lines(top, lines, ["train/entropy"])
    groups = _lines(bottom, lines, ["train/zero_std_ratio", "rollout/truncated_ratio"])
    return entropy or groups


def _phases(figure, lines):
    axis = figure.subplots()
    names = _names(lines, lambda n: n.startswith("time/") and n not in _NOT_PHASES)
    steps = series(lines, "time/step").steps
    by_step = {values["step"]: values for values in lines}
    stacks = [[by_step[step].get(name) or 0.0 for step in steps] for name in names]
    if not steps or not names:
        return False
    base = [0.0] * len(steps)
    for name, values in zip(names, stacks, strict=True):
        axis.bar(steps, values, width=1.0, bottom=base, label=name)
        base = [a + b for a, b in zip(base, values, strict=True)]
    axis.set_ylabel("seconds")
    axis.legend(fontsize=7)
    return True


PICTURES: dict[str, Callable] = {
    "reward": _reward,
    "loss": _loss,
    "agreement": _agreement,
    "ratio": _ratio,
    "gradient": _gradient,
    "exploration": _exploration,
    "phases": _phases,
}


def _picture(name: str, draw: Callable, lines: list[dict], out: Path) -> Path | None:
    # A Figure made without pyplot is drawn by Agg: no display, and no global state in a training process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    if not draw(figure, lines):
        return None
    figure.suptitle(name)
    figure.axes[-1].set_xlabel("step")
    path = out / f"{name}.png"
    figure.savefig(path)
    return path
