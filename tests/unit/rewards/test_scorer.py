import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from omnitrain.errors import RewardError, RewardTimeout, RunError, UsageError
from omnitrain.recipe.rewards import ChoiceReward, MathReward, PythonReward
from omnitrain.rewards.scorer import Scorer

FUNCTIONS = Path(__file__).parent / "functions"


@pytest.fixture(autouse=True)
def working_directory(monkeypatch):
    monkeypatch.chdir(FUNCTIONS)


def python(name, **options):
    return PythonReward(kind="python", function=f"user_rewards:{name}", **options)


def row(number, answer="<answer>B</answer>", **meta):
    return {"id": f"row-{number}", "answer": answer, "source": "test", "meta": meta}


def gone(pid):
    """Whether the process has ended (or is a zombie that nobody has reaped yet)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pids, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(gone(pid) for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if not gone(pid)]


def test_several_rewards_are_summed_by_weight_for_every_sample():
    specs = [ChoiceReward(kind="choice", weight=2.0), python("length", weight=0.5), MathReward(kind="math")]
    with Scorer(specs, 2) as scorer:
        assert scorer.names == ["choice", "length", "math"]
        for key, response in enumerate(["<answer>7</answer>", "<answer>8</answer>", "no"]):
            scorer.submit(key, response, row(key, answer="<answer>7</answer>"))
        scored = scorer.collect()
    assert scored.keys() == {0, 1, 2}
    assert scored[0].values == {"choice": 1.0, "length": 18.0, "math": 1.0}
    assert [scored[key].reward for key in range(3)] == [12.0, 9.0, 1.0]
    assert not any(one.failed or one.skipped for one in scored.values())


def test_the_same_reward_twice_gets_two_names():
    with Scorer([python("length"), python("length", weight=2.0)], 1) as scorer:
        scorer.submit(0, "abc", row(0))
        assert scorer.collect()[0].values == {"length": 3.0, "length_2": 3.0}


def test_rewards_run_while_others_wait():
    with Scorer([python("slow")], 4) as scorer:
        scorer.submit(-1, "0", row(0))
        scorer.collect()
        start = time.monotonic()
        for key in range(4):
            scorer.submit(key, "0.5", row(key))
        assert time.monotonic() - start < 0.2
        scorer.collect()
        assert time.monotonic() - start < 1.5


def test_the_workers_import_neither_torch_nor_vllm_even_when_the_parent_has():
    import torch  # noqa: F401

    with Scorer([python("modules"), MathReward(kind="math")], 1) as scorer:
        scorer.submit(0, "", row(0, answer="1"))
        assert scorer.collect()[0].values["modules"] == 0.0


def test_a_worker_starts_within_a_second():
    start = time.monotonic()
    with Scorer([python("length")], 1):
        assert time.monotonic() - start < 1.0


def test_l6_a_sample_past_its_limit_is_killed_and_named_within_five_seconds():
    with Scorer([python("hang", timeout=1.0)], 2) as scorer:
        before = scorer.pids
        for key in range(8):
            scorer.submit(key, "hang" if key == 5 else "fine", row(key))
        start = time.monotonic()
        with pytest.raises(RewardTimeout, match=r'reward "hang" failed on sample row-5: .*1 s'):
            scorer.collect()
        assert time.monotonic() - start < 1.0 + 5.0
        scorer.submit(0, "fine", row(0))
        assert scorer.collect()[0].reward == 1.0
        assert len(set(before) - set(scorer.pids)) == 1 and not wait_gone(set(before) - set(scorer.pids), 1)


def test_l6_every_late_sample_is_excluded_under_skip_and_the_others_are_scored():
    with Scorer([python("hang", timeout=0.5, on_failure="skip")], 2) as scorer:
        for key in range(42):
            scorer.submit(key, "hang" if key in (3, 4) else "fine", row(key))
        scored = scorer.collect()
        assert [key for key, one in scored.items() if one.skipped] == [3, 4]
        assert "0.5 s" in scored[3].failed["hang"] and math.isnan(scored[3].reward) and not scored[3].values
        assert all(scored[key].reward == 1.0 for key in range(5, 42))
        assert scorer.stats()["hang"]["failed"] == 2


def test_what_a_killed_reward_started_is_killed_with_it(tmp_path):
    with Scorer([python("hang_with_child", timeout=1.0)], 1) as scorer:
        scorer.submit(0, str(tmp_path / "pid"), row(0))
        with pytest.raises(RewardTimeout):
            scorer.collect()
    assert not wait_gone([int((tmp_path / "pid").read_text())], 2)


@pytest.mark.parametrize("what", ["none", "nan", "inf", "text", "list", "list of one", "array", "dict"])
def test_r2_anything_but_one_finite_number_is_a_failure_and_never_zero(what, odd_scorers):
    fail, skip, value = odd_scorers
    for key in range(20):
        for scorer in odd_scorers:
            scorer.submit(key, what if key == 7 else "fine", row(key))
    with pytest.raises(RewardError, match='reward "odd" failed on sample row-7: returned'):
        fail.collect()
    scored = skip.collect()
    assert scored[7].skipped and math.isnan(scored[7].reward) and "odd" not in scored[7].values
    assert [one.reward for key, one in scored.items() if key != 7] == [1.0] * 19
    assert skip.stats()["odd"]["failed"] == 1
    scored = value.collect()
    assert scored[7].reward == -2.5 and scored[7].values == {"odd": -2.5} and not scored[7].skipped
    assert "returned" in scored[7].failed["odd"] and value.stats()["odd"]["failed"] == 1


@pytest.fixture(scope="module")
def odd_scorers():
    here = os.getcwd()
    os.chdir(FUNCTIONS)
    policies = ("fail", "skip", "value:-2.5")
    scorers = [Scorer([python("odd", on_failure=policy)], 1) for policy in policies]
    os.chdir(here)
    yield scorers
    for scorer in scorers:
        scorer.close()


@pytest.mark.parametrize(
    "what, value", [("bool", 1.0), ("int", 2.0), ("numpy", 0.5), ("numpy array of no dimension", 0.5)]
)
def test_one_finite_number_of_any_type_is_taken(what, value, odd_scorers):
    odd_scorers[0].submit(0, what, row(0))
    assert odd_scorers[0].collect()[0].reward == value


def test_r2_more_than_five_percent_skipped_stops_the_run(odd_scorers):
    _, skip, _ = odd_scorers
    for key in range(8):
        skip.submit(key, "nan" if key == 3 else "fine", row(key))
    with pytest.raises(RunError, match=r"1 of 8 samples \(12.5%\).*\n.*returned nan"):
        skip.collect()
    for key in range(8):
        skip.submit(key, "nan" if key == 3 else "fine", row(key))
    assert skip.collect(max_skipped=None)[3].skipped


def test_r5_an_exception_keeps_its_traceback_and_the_samples_id(odd_scorers):
    odd_scorers[0].submit(0, "raise", row(12))
    with pytest.raises(RewardError) as caught:
        odd_scorers[0].collect()
    message = str(caught.value)
    assert "sample row-12: KeyError: 'no such colour'" in message
    assert "Traceback" in message and "user_rewards.py" in message and 'raise KeyError("no such colour")' in message


@pytest.mark.parametrize(
    "what, says",
    [
        ("exit", "SystemExit: 3"),
        ("die", "exited with code 7"),
        ("segfault", "SIGSEGV"),
    ],
)
def test_a_reward_that_ends_its_process_fails_its_sample_alone(what, says, odd_scorers):
    _, skip, _ = odd_scorers
    for key in range(20):
        skip.submit(key, what if key == 4 else "fine", row(key))
    scored = skip.collect()
    assert says in scored[4].failed["odd"]
    assert sum(one.reward == 1.0 for one in scored.values()) == 19


def test_a_reward_that_dies_while_its_child_holds_the_pipe_fails_soon_and_the_child_ends(tmp_path):
    with Scorer([python("orphan", timeout=600)], 1) as scorer:
        scorer.submit(0, str(tmp_path / "pid"), row(0))
        start = time.monotonic()
        with pytest.raises(RewardError, match="row-0: its process exited with code 9"):
            scorer.collect()
        assert time.monotonic() - start < 5
        assert not wait_gone([int((tmp_path / "pid").read_text())], 2)


def test_a_crash_says_what_the_process_wrote_last(odd_scorers):
    odd_scorers[0].submit(0, "die", row(0))
    with pytest.raises(RewardError, match="(?s)row-0.*exited with code 7.*about to die"):
        odd_scorers[0].collect()


def test_r4_times_are_measured_per_reward_and_the_slowest_sample_is_named():
    with Scorer([python("slow"), python("length")], 2) as scorer:
        for key in range(20):
            scorer.submit(key, "0.6" if key == 13 else "0.01", row(key))
        scorer.collect()
        stats = scorer.stats()
    assert stats["slow"]["slowest"] == "row-13" and stats["slow"]["count"] == 20
    assert 0.01 <= stats["slow"]["p50"] < 0.3 and stats["slow"]["p95"] < 0.5 and stats["slow"]["max"] >= 0.6
    assert stats["length"]["max"] < 0.1


def test_waiting_reports_how_many_samples_are_done():
    seen = []
    with Scorer([python("slow")], 1) as scorer:
        for key in range(3):
            scorer.submit(key, "0.3", row(key))
        scorer.collect(progress=lambda done, total: seen.append((done, total)))
    assert seen and all(total == 3 and 0 <= done < 3 for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] >= 1


def test_g9_the_canary_reports_values_failures_and_time_without_raising_or_counting():
    specs = [ChoiceReward(kind="choice"), python("odd"), python("slow")]
    with Scorer(specs, 2) as scorer:
        report = scorer.canary([row(0), row(1, answer="B")], "0.1")
        assert report["choice"]["values"] == [0.0] and "row row-1: ValueError" in report["choice"]["failures"][0]
        assert report["odd"] == {"values": [1.0, 1.0], "failures": [], "seconds": report["odd"]["seconds"]}
        assert report["slow"]["seconds"] >= 0.1
        assert scorer.stats() == {}
        scorer.submit(0, "0", row(0))
        with pytest.raises(ValueError, match="pending"):
            scorer.canary([row(0)], "0")


def test_a_key_submitted_twice_is_refused():
    with Scorer([python("length")], 1) as scorer:
        scorer.submit(0, "a", row(0))
        with pytest.raises(ValueError, match="twice"):
            scorer.submit(0, "a", row(0))
        assert scorer.collect()[0].reward == 1.0


@pytest.mark.parametrize(
    "function, says",
    [
        ("no_such_module:score", r"no module named 'no_such_module' in .*functions"),
        ("user_rewards:no_such_function", "user_rewards.py.* has no 'no_such_function'"),
        ("user_rewards:not_callable", "is a int, not a function"),
        ("broken_module:score", r"a_library_that_is_not_installed[\s\S]*broken_module.py"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start_by_its_field(function, says):
    specs = [ChoiceReward(kind="choice"), PythonReward(kind="python", function=function)]
    with pytest.raises(UsageError, match=rf'rewards\[1\].function = "{function}" cannot be loaded: .*{says}'):
        Scorer(specs, 2)


def test_without_waiting_a_reward_that_cannot_be_loaded_is_raised_by_collect():
    with Scorer([PythonReward(kind="python", function="no_such_module:score")], 1, wait=False) as scorer:
        scorer.submit(0, "", row(0))
        with pytest.raises(UsageError, match="no_such_module"):
            scorer.collect()


def test_a_kind_that_does_not_exist_is_refused_by_its_field():
    spec = SimpleNamespace(kind="no_such_kind", weight=1.0, timeout=1.0, on_failure="fail")
    with pytest.raises(UsageError, match=r'rewards\[0\].kind = "no_such_kind"'):
        Scorer([spec], 1)


def test_what_rewards_print_goes_to_the_log_and_not_to_the_terminal(tmp_path, capfd):
    with Scorer([python("write")], 1, log=tmp_path / "rewards.log") as scorer:
        scorer.submit(0, "", row(0))
        scorer.collect()
    with Scorer([python("write")], 1) as scorer:
        scorer.submit(0, "", row(0))
        scorer.collect()
    assert "printed by a reward" in (tmp_path / "rewards.log").read_text()
    assert capfd.readouterr() == ("", "")


def test_closing_ends_the_processes_even_when_they_hang():
    scorer = Scorer([python("hang", timeout=600)], 2)
    scorer.submit(0, "hang", row(0))
    pids = scorer.pids
    start = time.monotonic()
    scorer.close()
    scorer.close()
    assert time.monotonic() - start < 2 and not wait_gone(pids, 1)


PARENT = """
    import sys, time
    sys.path.insert(0, {root!r})
    from types import SimpleNamespace
    from omnitrain.rewards.scorer import Scorer
    spec = SimpleNamespace(
        kind="python", function="user_rewards:hang", weight=1.0, timeout=600.0, on_failure="fail"
    )
    scorer = Scorer([spec], 2)  # no `if __name__ == "__main__"`: a worker must not run this again
    for key in range(2):
        scorer.submit(key, "hang", {{"id": "a", "answer": "", "source": "", "meta": {{}}}})
    time.sleep(0.3)
    print(*scorer.pids, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_that_hang_die_with_a_killed_parent(sent):
    code = textwrap.dedent(PARENT).format(root=str(Path(__file__).parents[3]))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(gone(pid) for pid in pids)
        parent.send_signal(sent)
        parent.wait(5)
    assert not wait_gone(pids, 3)


def test_l6_a_failure_can_be_heard_before_the_rollout_is_over():
    with Scorer([python("hang", timeout=0.3)], workers=1) as scorer:
        scorer.check()
        scorer.submit(0, "hang", row(0))
        deadline = time.monotonic() + 10
        with pytest.raises(RewardTimeout, match="sample row-0"):
            while time.monotonic() < deadline:
                scorer.check()
                time.sleep(0.05)
        scorer.check()
        assert scorer.collect() == {}


def test_a_missing_function_is_refused_in_one_line():
    with pytest.raises(UsageError, match="has no 'nope'$"), Scorer([python("nope")], workers=1):
        pass


def test_r6_a_reward_that_is_a_network_keeps_no_gradients():
    with Scorer([PythonReward(kind="python", function="torch_rewards:gradients")], 1) as scorer:
        scorer.submit(0, "", row(0))
        assert scorer.collect()[0].reward == 0.0
