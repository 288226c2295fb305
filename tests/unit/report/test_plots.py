import json

import numpy as np
import pytest
from PIL import Image

from omnitrain.report.plots import read_metrics, series, write_plots
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
