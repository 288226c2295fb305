import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from omnitrain.report.plots import PICTURES, read_metrics, series, write_plots
from omnitrain.train.metrics import METRICS, family


def _online_lines(steps=4):
    for step in range(steps):
        yield {
            "step": step, "train/reward_mean": 0.3 + 0.1 * step, "train/reward_std": 0.2, "train/loss": 0.1,
            "rollout/pearson": 0.999, "rollout/logp_diff_mean": 0.0, "rollout/logp_diff_max": 1e-5,
            "train/ratio_mean": 1.0, "train/ratio_max": 1.1, "train/clip_low_fraction": 0.1,
            "train/grad_norm": 1.5, "train/learning_rate": 1e-3, "train/entropy": 2.0, "train/zero_std_ratio": 0.1,
            "val/avqa/accuracy": 0.4, "time/rollout": 1.0, "time/update": 2.0, "time/step": 3.1,
            "rollout/engine": "vllm_omni",
        }  # fmt: skip


def _write(run, lines):
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_picture_of_an_online_run_shows_something(tmp_path):
    _write(tmp_path, _online_lines())
    files = write_plots(tmp_path / "metrics.jsonl", tmp_path / "plots")
    assert sorted(f.stem for f in files) == [
        "agreement", "exploration", "gradient", "loss", "phases", "ratio", "reward",
    ]  # fmt: skip
    for file in files:
        assert file.parent == tmp_path / "plots"
        assert np.asarray(Image.open(file).convert("L")).std() > 5, f"{file.name} is blank"


def test_a_run_without_rollouts_has_no_picture_of_them(tmp_path):
    _write(tmp_path, [{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": None}])
    assert [f.stem for f in write_plots(tmp_path / "metrics.jsonl", tmp_path / "plots")] == ["loss"]


def test_a_half_written_last_line_is_left_out_but_a_damaged_middle_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "tra')
    assert series(read_metrics(path), "train/loss").values == [0.5]
    path.write_text('{"step": 1, "tra\n{"step": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_metrics(path)


def test_a_step_written_again_after_a_resume_counts_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 1}\n{"step": 2, "train/loss": 2}\n{"step": 2, "train/loss": 3}\n')
    found = series(read_metrics(path), "train/loss")
    assert (found.steps, found.values) == ([1, 2], [1, 3])


def test_the_plotted_names_are_documented_metrics():
    assert {family(name) for line in _online_lines(1) for name in line} <= set(METRICS)
    from omnitrain.report import plots

    source = open(plots.__file__).read()
    import re

    for name in re.findall(r'"((?:train|rollout|time)/\w+)"', source):
        assert name in METRICS, name


def _axes(picture, lines):
    """The axes of one picture, as drawn."""
    figure = Figure()
    assert PICTURES[picture](figure, list(lines))
    return figure.axes


def _labels(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_a_panel_without_a_series_is_not_drawn():
    (axis,) = _axes("exploration", [{"step": 1, "train/entropy": 1.0}, {"step": 2, "train/entropy": 0.5}])
    assert _labels(axis) == ["train/entropy"]
    assert len(_axes("exploration", _online_lines())) == 2


def _band(rewards):
    lines = [{"step": i, "train/reward_mean": m, "train/reward_std": s} for i, (m, s) in enumerate(rewards)]
    (axis,) = _axes("reward", lines)
    heights = axis.collections[0].get_paths()[0].vertices[:, 1]
    return heights.min(), heights.max()


def test_the_band_of_rewards_between_0_and_1_stays_there_and_that_of_others_does_not():
    assert _band([(0.3, 0.45), (0.9, 0.3)]) == (0.0, 1.0)
    assert _band([(0.5, 0.9), (0.5, 0.5)]) == pytest.approx((-0.4, 1.4))  # such a spread needs rewards beyond 0 and 1
    assert _band([(2.0, 0.5), (0.5, 0.5)]) == pytest.approx((0.0, 2.5))


@pytest.mark.parametrize("reward, style", [(0.4, "--"), (0.7, "-")])
def test_a_validation_reward_that_hides_the_accuracy_is_dashed(reward, style):
    (axis,) = _axes("reward", [line | {"val/avqa/reward": reward} for line in _online_lines()])
    styles = {line.get_label(): line.get_linestyle() for line in axis.lines}
    assert styles["val/avqa/reward"] == style and styles["val/avqa/accuracy"] == "-"


@pytest.mark.parametrize("last, scale", [(1 - 1e-9, "log"), (1.0, "symlog")])
def test_agreement_shows_how_far_pearson_is_from_1_on_a_logarithmic_axis(last, scale):
    top, _ = _axes("agreement", [*_online_lines(3), {"step": 3, "rollout/pearson": last}])
    assert _labels(top) == ["1 - rollout/pearson"] and top.get_yscale() == scale
    assert top.lines[0].get_ydata()[-1] == pytest.approx(1 - last)


def test_phases_stand_in_the_order_of_a_step_beside_the_picture():
    order = ["data", "wake_sleep", "sync", "rollout", "reward_wait", "exchange", "old_logprobs", "update", "logging"]
    line = {f"time/{name}": 1.0 for name in [*sorted(order), "step"]} | {"step": 1}
    (axis,) = _axes("phases", [line])
    bottoms = {bars.get_label(): bars.patches[0].get_y() for bars in axis.containers}
    assert sorted(bottoms, key=bottoms.get) == [f"time/{name}" for name in order]
    axis.figure.draw_without_rendering()
    assert axis.get_legend().get_window_extent().x0 >= axis.get_window_extent().x1


@pytest.mark.parametrize("last, scale", [(0.1, "log"), (1.0, "linear"), (-0.1, "linear")])
def test_a_loss_that_falls_far_is_drawn_on_a_logarithmic_axis(last, scale):
    (axis,) = _axes("loss", [{"step": 1, "train/loss": 9.0}, {"step": 2, "train/loss": last}])
    assert axis.get_yscale() == scale


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("picture, name", [("reward", "val/avqa/reward"), ("loss", "val/avqa/loss")])
def test_a_run_that_only_validated_has_its_picture_without_a_warning(picture, name):
    (axis,) = _axes(picture, [{"step": 0, name: 0.5}])
    assert _labels(axis) == [name]
