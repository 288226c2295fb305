"""Several rewards: which rows each scores, and that they run beside each other."""

import math
from pathlib import Path

import pytest

from omnitrain.errors import UsageError
from omnitrain.recipe.rewards import ChoiceReward, HttpReward, LengthReward, MathReward, PythonReward
from omnitrain.rewards.scorer import Scorer

FUNCTIONS = Path(__file__).parent / "functions"


@pytest.fixture(autouse=True)
def working_directory(monkeypatch):
    monkeypatch.chdir(FUNCTIONS)


def python(name, **options):
    return PythonReward(kind="python", function=f"user_rewards:{name}", **options)


def row(number, source, answer, **more):
    return {"id": f"row-{number}", "answer": answer, "source": source, "meta": {}} | more


def test_a_reward_with_sources_scores_their_rows_alone():
    specs = [
        ChoiceReward(kind="choice", sources=["avqa"], weight=2.0),
        MathReward(kind="math", sources=["gsm8k", "more"]),
        python("length", weight=0.5),
    ]
    with Scorer(specs, 2) as scorer:
        scorer.submit(0, "<answer>B</answer>", row(0, "avqa", "<answer>B</answer>"))
        scorer.submit(1, "18", row(1, "gsm8k", "18"))
        scorer.submit(2, "17", row(2, "gsm8k", "18"))
        scorer.submit(3, "abcd", row(3, "elsewhere", None))
        scored = scorer.collect()
        stats = scorer.stats()
        report = scorer.canary([row(0, "avqa", "<answer>B</answer>"), row(1, "gsm8k", "3")], "3")
    assert [scored[key].values for key in range(4)] == [
        {"choice": 1.0, "length": 18.0},
        {"math": 1.0, "length": 2.0},
        {"math": 0.0, "length": 2.0},
        {"length": 4.0},
    ]
    assert [scored[key].reward for key in range(4)] == [11.0, 2.0, 1.0, 2.0]
    assert {name: found["count"] for name, found in stats.items()} == {"choice": 1, "math": 2, "length": 4}
    assert {name: found["values"] for name, found in report.items()} == {
        "choice": [0.0],
        "math": [1.0],
        "length": [1.0, 1.0],
    }


def test_names_lead_to_kinds_and_weights():
    specs = [ChoiceReward(kind="choice"), ChoiceReward(kind="choice", weight=0.5), python("length", weight=-1)]
    with Scorer(specs, 1, wait=False) as scorer:
        assert scorer.weights == {"choice": 1.0, "choice_2": 0.5, "length": -1.0}
        assert scorer.kinds == {"choice": "choice", "choice_2": "choice", "length": "python"}


def test_a_source_that_no_reward_scores_is_refused_early_and_at_the_row():
    with Scorer([ChoiceReward(kind="choice", sources=["avqa"])], 1, wait=False) as scorer:
        scorer.check_sources({"avqa"})
        with pytest.raises(UsageError, match='no reward scores the rows of source "gsm8k"'):
            scorer.check_sources({"avqa", "gsm8k"})
        with pytest.raises(UsageError, match='no reward scores row row-7 of source "gsm8k"'):
            scorer.submit(0, "", row(7, "gsm8k", "1"))
        assert scorer.collect() == {}


def test_a_source_that_no_row_has_is_refused_by_its_field():
    with Scorer([ChoiceReward(kind="choice"), MathReward(kind="math", sources=["gms8k"])], 1, wait=False) as scorer:
        with pytest.raises(
            UsageError, match=r'rewards\[1\].sources: no row has the source "gms8k"; they have avqa, gsm8k'
        ):
            scorer.check_sources({"avqa", "gsm8k"})


def test_a_failed_reward_of_one_source_leaves_the_other_source_alone():
    specs = [python("odd", sources=["a"], on_failure="skip"), python("length", sources=["b"])]
    with Scorer(specs, 1) as scorer:
        scorer.submit(0, "nan", row(0, "a", None))
        scorer.submit(1, "nan", row(1, "b", None))
        scored = scorer.collect(max_skipped=None)
    assert scored[0].skipped and math.isnan(scored[0].reward) and scored[1].reward == 3.0


def test_the_rewards_of_one_sample_run_at_the_same_time(server, tmp_path):
    """Each waits for the other two to have begun: one after the other they would never end."""
    here, url = tmp_path / "python", tmp_path / "http"

    def answer(request, number):
        if request.json["id"] != "canary":
            url.touch()
            while not here.exists() and not server.released.wait(0.02):
                pass
        return 200, {}, {"score": 1}

    server.answer = answer
    specs = [python("meet"), python("meet_second"), HttpReward(kind="http", url=server.root)]
    with Scorer([spec.model_copy(update={"timeout": 30.0}) for spec in specs], 2) as scorer:
        scorer.submit(0, str(tmp_path), row(0, "a", None))
        assert scorer.collect()[0].values == {"meet": 1.0, "meet_second": 1.0, "http": 1.0}


def test_options_of_a_table_reach_the_process():
    with Scorer([LengthReward(kind="length", buffer=10, limit=20), LengthReward(kind="length", buffer=5)], 1) as scorer:
        scorer.submit(0, "", row(0, "a", None, response_tokens=15, max_new_tokens=15))
        assert scorer.collect()[0].values == {"length": -0.5, "length_2": -1.0}


def test_r4_the_slowest_sample_is_logged_by_its_id(tmp_path):
    log = tmp_path / "rewards.log"
    with Scorer([python("slow"), python("length")], 2, log=log) as scorer:
        for key in range(4):
            scorer.submit(key, "0.3" if key == 2 else "0.01", row(key, "a", None))
        scorer.collect()
    line = next(
        line for line in log.read_text().splitlines() if line.startswith("omnitrain: slow: 4 samples, 0 failed")
    )
    assert line.endswith("on sample row-2") and "p50 0.01" in line and "slowest 0.3" in line
