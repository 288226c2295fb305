"""What the launcher makes of the ranks' files, torchrun's arguments and the environment."""

import errno
import json

import pytest

from omnitrain import launch
from omnitrain.errors import GateRefused
from omnitrain.rundir import RunDir, write_exit


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


def error(run, rank: int, when: float, code: int, text: str) -> None:
    (run.logs / f"rank_{rank}.error").write_text(f"{rank} {when} {code}\n{text}\n")


def failures(run, *ended) -> None:
    rows = [{"rank": rank, "exitcode": code, "time": when} for rank, code, when in ended]
    (run.logs / "failures.json").write_text(json.dumps(rows))


def test_rank_0s_word_is_the_exit_code(run):
    write_exit(run, 130, "stopped")
    assert launch.outcome(run, 0) == (130, "stopped")


def test_the_first_error_wins_over_its_echo_on_rank_0(run):
    error(run, 1, 10.0, 3, "gate G6 refused")
    error(run, 0, 10.5, 1, "Connection closed by peer")
    write_exit(run, 1, "Connection closed by peer")
    failures(run, (0, 1, 11), (1, 3, 11))
    assert launch.outcome(run, 1) == (3, "rank 1: gate G6 refused")


def test_a_killed_rank_wins_over_the_errors_of_those_it_left(run):
    error(run, 0, 10.0, 1, "Connection closed by peer")
    failures(run, (0, 1, 11), (1, -9, 11))
    code, message = launch.outcome(run, 1)
    assert code == 1 and message.startswith("rank 1 was killed by SIGKILL (out of memory?")


def test_a_rank_that_died_before_it_could_report_is_named(run):
    failures(run, (0, -15, 11), (1, 7, 11))
    assert launch.outcome(run, 1)[1].startswith("rank 1 ended with status 7")


def test_errors_of_an_earlier_run_are_not_this_ones(run):
    error(run, 0, 10.0, 3, "old")
    assert "before any rank could report" in launch.outcome(run, 1, start=20.0)[1]


def test_a_bad_end_after_a_finished_run_is_said(run):
    write_exit(run, 0)
    code, message = launch.outcome(run, 1)
    assert code == 1 and "finished and saved" in message


def test_an_error_a_user_can_act_on_is_its_message_alone(monkeypatch):
    assert launch.describe(GateRefused("no")) == (3, "no")
    code, text = launch.describe(ValueError("bug"))
    assert code == 1 and text.endswith("ValueError: bug\n")
    monkeypatch.setenv(launch.TRACEBACK, "1")
    assert launch.describe(GateRefused("no"))[1].endswith("GateRefused: no\n")


@pytest.mark.parametrize(
    "arguments, token, added",
    [
        ([], None, ["--standalone"]),
        (["--log-dir", "x"], None, ["--standalone"]),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv_id=7"],
            "--rdzv-endpoint a:1 --rdzv-id 7",
            ["--rdzv-backend", "c10d"],
        ),
        (["--nnodes=2", "--node-rank=1", "--master_addr", "b"], "--master-addr b", []),
    ],
)
def test_a_rendezvous_of_the_users_is_recognised(arguments, token, added):
    assert launch.nodes_token(arguments) == token
    assert launch._rendezvous(arguments) == added


@pytest.mark.parametrize("visible, count", [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("MIG-a,MIG-b,MIG-c", 3)])
def test_accelerators_are_counted_as_the_ranks_will_see_them(monkeypatch, visible, count):
    monkeypatch.setattr(launch.os, "listdir", lambda path: ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.visible_accelerators() == (
        launch.Accelerators("cuda", count) if count else launch.Accelerators("cpu", 1)
    )


def test_l3_the_engine_stays_in_the_ranks_process_whatever_the_user_has_set(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert launch.environment("cpu")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert launch.environment("cpu")["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_notes_cut_short_by_a_full_disk_do_not_hide_the_ranks_error(run):
    error(run, 0, 10.0, 1, "no space")
    (run.logs / "failures.json").write_text("")
    assert launch.outcome(run, 1) == (1, "no space")


def test_a_full_disk_or_a_missing_right_is_no_bug_and_has_no_traceback(monkeypatch):
    for number, words in ((errno.ENOSPC, "no space left"), (errno.EACCES, "permission denied")):
        error = OSError(number, "text", "/data/metrics.jsonl")
        code, text = launch.describe(error)
        assert code == 1 and text.startswith(f"/data/metrics.jsonl: {words}") and "\n" not in text
    monkeypatch.setenv(launch.TRACEBACK, "1")
    assert "PermissionError" in launch.describe(error)[1]
    assert launch.describe(FileNotFoundError(errno.ENOENT, "text", "x"))[1].startswith("FileNotFoundError")
