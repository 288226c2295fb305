import os
import time

import pytest

from omnitrain.doctor.check import Check, Finding, run_checks, run_python


def test_findings_come_in_the_order_of_the_checks_however_long_each_takes():
    def slow():
        time.sleep(0.2)
        return Finding("slow", "ok", "")

    checks = [Check("slow", slow), Check("two", lambda: [Finding("a", "ok", ""), Finding("b", "ok", "")])]
    assert [f.name for f in run_checks(checks)] == ["slow", "a", "b"]


def test_checks_run_side_by_side():
    checks = [Check(str(i), lambda i=i: (time.sleep(0.3), Finding(str(i), "ok", ""))[1]) for i in range(4)]
    start = time.perf_counter()
    assert len(list(run_checks(checks, workers=4))) == 4
    assert time.perf_counter() - start < 1.0


def test_a_check_that_raises_is_a_problem_and_the_others_go_on():
    def broken():
        raise OSError("no such device\nsecond line")

    first, second = run_checks([Check("broken", broken), Check("fine", lambda: Finding("fine", "ok", ""))])
    assert (first.name, first.status) == ("broken", "problem")
    assert "OSError: no such device" in first.detail and "second line" not in first.detail
    assert second.status == "ok"


def test_a_problem_without_a_fix_is_refused():
    with pytest.raises(AssertionError, match="without a fix"):
        Finding("x", "problem", "broken")


def test_the_reason_of_a_failed_process_is_its_exception():
    outcome = run_python(["-c", "import sys; print('noise: Error', file=sys.stderr); raise ValueError('bad thing')"], timeout=30)
    assert outcome.code == 1
    assert outcome.reason() == "ValueError: bad thing"


def test_a_hanging_process_is_killed_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    outcome = run_python(["-c", code], timeout=2)
    assert outcome.code == 124 and "ran out of time" in outcome.reason()
    child = int(pid_file.read_text())
    for _ in range(50):
        if not _alive(child):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} outlived the check")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
