import json
from pathlib import Path

import pytest

from omnitrain.train.metrics import MetricsFile, family, table

DOCS = Path(__file__).parents[3] / "docs"


def test_every_name_is_documented_in_one_place():
    assert table() in (DOCS / "metrics.md").read_text()


def test_a_task_may_hold_slashes():
    assert family("val/openai/gsm8k/accuracy") == "val/<task>/accuracy"
    assert family("reward/choice/mean") == "reward/<name>/mean"


def test_an_undocumented_name_is_refused_and_nothing_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(KeyError, match="train/lost"):
        file.write({"step": 1, "train/lost": 0.5})
    file.write({"step": 1, "train/loss": float("nan"), "val/avqa/accuracy": 0.5, "reward/choice/mean": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "train/loss": None,
        "val/avqa/accuracy": 0.5,
        "reward/choice/mean": 1.0,
    }
