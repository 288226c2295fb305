import json

import pytest
import typer
from typer.testing import CliRunner

from omnitrain import doctor
from omnitrain.cli import bench as bench_command
from omnitrain.cli import doctor as command
from omnitrain.doctor.check import Check, Finding
from omnitrain.errors import UsageError


@pytest.fixture
def run(monkeypatch):
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    bench_command.register(app)

    def invoke(*arguments, findings=()):
        checks = [Check(finding.name, lambda finding=finding: finding) for finding in findings]
        monkeypatch.setattr(doctor, "all_checks", lambda loaded, quick: checks)
        return CliRunner().invoke(app, list(arguments))

    return invoke


GOOD = Finding("disk", "ok", "enough")
WARNED = Finding("hub", "warning", "unreachable", "export HF_HUB_OFFLINE=1")
BROKEN = Finding("torch", "problem", "gone", "make install")


def test_a_problem_is_exit_code_1_and_a_warning_is_not(run):
    assert run("doctor", findings=[GOOD, WARNED]).exit_code == 0
    assert run("doctor", findings=[GOOD, BROKEN]).exit_code == 1


def test_each_finding_is_a_line_and_its_fix_another(run):
    lines = run("doctor", findings=[GOOD, WARNED, BROKEN]).output.splitlines()
    assert lines[0].startswith("✓ disk")
    assert lines[1].startswith("! hub") and lines[2].strip() == "fix: export HF_HUB_OFFLINE=1"
    assert lines[3].startswith("✗ torch") and lines[4].strip() == "fix: make install"
    assert lines[5] == "3 checks, 1 warnings, 1 problems"


def test_json_is_the_findings_and_nothing_else(run):
    result = run("doctor", "--json", findings=[GOOD, BROKEN])
    assert result.exit_code == 1
    assert json.loads(result.output) == [GOOD.as_dict(), BROKEN.as_dict()]


def test_bench_without_a_measurement_is_a_usage_error(run, tmp_path):
    result = run("bench", str(tmp_path / "recipe.toml"))
    assert isinstance(result.exception, UsageError) and "--agreement" in str(result.exception)


def test_quick_starts_no_process(monkeypatch):
    monkeypatch.undo()
    quick = {check.name for check in doctor.all_checks(quick=True)}
    whole = {check.name for check in doctor.all_checks()}
    assert whole - quick == {"torch", "torchvision", "torchaudio", "vllm", "vllm_omni", "two ranks", "engine"}
