"""Pictures of a run, drawn from metrics.jsonl alone: plots/*.png."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A phase that METRICS gives a time of its own but that is no part of time/step.
_NOT_PHASES = ("time/step", "time/overhead_share", "time/validate", "time/checkpoint")
# In the order of a step.
_PHASES = (
    "time/data", "time/wake_sleep", "time/sync", "time/rollout", "time/reward_wait", "time/exchange",
    "time/old_logprobs", "time/update", "time/logging",
)  # fmt: skip
WIDE = 30.0
"""A loss whose largest value is so many times its smallest is drawn on a logarithmic axis."""


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


def _present(lines: list[dict], names: list[str]) -> list[Series]:
    return [found for name in names if (found := series(lines, name)).steps]


def _draw(axis, drawn: list[Series], *, marker: str | None = None, dashed: tuple[str, ...] = ()) -> None:
    """Draw series into one axis, with a legend; those named in `dashed` let one below them show."""
    if not drawn:
        return
    for s in drawn:
        single = "o" if len(s.steps) == 1 else marker
        style = "--" if s.name in dashed else "-"
        axis.plot(s.steps, s.values, style, label=s.name, marker=single, markersize=3, linewidth=1.2)
    # A correlation of 0.99999 must not be written as an offset at the axis's end.
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.legend(fontsize=7)


def _log(axis, drawn: list[Series]) -> None:
    """A logarithmic axis for differences. One of exactly 0 is the best there is: it is drawn on the floor."""
    values = [value for s in drawn for value in s.values]
    positive = [value for value in values if value > 0]
    if len(positive) == len(values):
        axis.set_yscale("log")
    elif positive:
        axis.set_yscale("symlog", linthresh=min(positive))
        axis.set_ylim(bottom=0)


def _panels(figure, panels: list[list[Series]]) -> list:
    """One axis per panel that has something to show, above each other; drawn in order."""
    shown = [panel for panel in panels if panel]
    if not shown:
        return []
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, shown, strict=True):
        _draw(axis, panel)
    return list(zip(axes, shown, strict=True))


def _spread(mean: Series, std: Series) -> tuple[list[float], list[float]]:
    """Lower and upper edge of mean +- std, without the part that rewards between 0 and 1 cannot reach."""
    pairs = list(zip(mean.values, std.values, strict=True))
    # No distribution on [0, 1] has a larger variance than m (1 - m): a larger one shows rewards beyond it.
    unit = all(0 <= m <= 1 and s * s <= m * (1 - m) + 1e-9 for m, s in pairs)
    low, high = [m - s for m, s in pairs], [m + s for m, s in pairs]
    return ([max(0.0, x) for x in low], [min(1.0, x) for x in high]) if unit else (low, high)


def _reward(figure, lines):
    mean, std = series(lines, "train/reward_mean"), series(lines, "train/reward_std")
    trained = _present(lines, ["train/reward_mean"])
    validated = _present(lines, _names(lines, lambda n: n.startswith("val/") and n.endswith(("/accuracy", "/reward"))))
    if not trained and not validated:
        return False
    axis = figure.subplots()
    if trained and mean.steps == std.steps:
        axis.fill_between(mean.steps, *_spread(mean, std), alpha=0.15, linewidth=0, label="mean ± std")
    by_name = {s.name: s for s in validated}
    accuracies = {name: by_name.get(name.removesuffix("reward") + "accuracy") for name in by_name}
    same = [
        n for n, s in by_name.items() if n.endswith("/reward") and accuracies[n] and accuracies[n].values == s.values
    ]
    _draw(axis, trained)
    _draw(axis, validated, marker="o", dashed=tuple(same))
    return True


def _loss(figure, lines):
    trained = _present(lines, ["train/loss", "train/kl"])
    validated = _present(lines, _names(lines, lambda n: n.startswith("val/") and n.endswith("/loss")))
    drawn = trained + validated
    if not drawn:
        return False
    axis = figure.subplots()
    _draw(axis, trained)
    _draw(axis, validated, marker="o")
    values = [value for s in drawn for value in s.values]
    if min(values) > 0 and max(values) > WIDE * min(values):
        axis.set_yscale("log")
    return True


def _agreement(figure, lines):
    pearson = [
        Series("1 - rollout/pearson", s.steps, [max(0.0, 1 - value) for value in s.values])
        for s in _present(lines, ["rollout/pearson"])
    ]
    differences = _present(lines, ["rollout/logp_diff_mean", "rollout/logp_diff_max", "rollout/k3"])
    panels = _panels(figure, [pearson, differences])
    for axis, drawn in panels:
        _log(axis, drawn)
    return bool(panels)


def _ratio(figure, lines):
    ratio = _present(lines, ["train/ratio_mean", "train/ratio_max"])
    clips = _present(lines, ["train/clip_low_fraction", "train/clip_high_fraction"])
    return bool(_panels(figure, [ratio, clips]))


def _gradient(figure, lines):
    return bool(_panels(figure, [_present(lines, ["train/grad_norm"]), _present(lines, ["train/learning_rate"])]))


def _exploration(figure, lines):
    entropy = _present(lines, ["train/entropy"])
    groups = _present(lines, ["train/zero_std_ratio", "rollout/truncated_ratio"])
    return bool(_panels(figure, [entropy, groups]))


def _phases(figure, lines):
    found = _names(lines, lambda n: n.startswith("time/") and n not in _NOT_PHASES)
    names = [name for name in _PHASES if name in found] + [name for name in found if name not in _PHASES]
    steps = series(lines, "time/step").steps
    if not steps or not names:
        return False
    axis = figure.subplots()
    by_step = {values["step"]: values for values in lines}
    base = [0.0] * len(steps)
    for name in names:
        values = [by_step[step].get(name) or 0.0 for step in steps]
        axis.bar(steps, values, width=1.0, bottom=base, label=name)
        base = [a + b for a, b in zip(base, values, strict=True)]
    axis.set_ylim(0, 1.05 * max(base))
    axis.set_ylabel("seconds")
    # From the top down as the bars are stacked.
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
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
