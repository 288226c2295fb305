"""The command line: exit codes, short errors, nothing heavy imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.run.test_rundir import RECIPE

ROOT = Path(__file__).parents[3]


def omnitrain(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        [sys.executable, "-m", "omnitrain", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    return path


def test_help_lists_the_commands_and_imports_nothing_heavy(tmp_path):
    code = (
        "import sys\n"
        "from omnitrain.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'vllm', 'transformers', 'pyarrow', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("train", "plan", "rehearse", "prepare", "recipes", "doctor", "bench", "schema", "explain"):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--version"], 0),
        (["train"], 2),
        (["trian"], 2),
        (["train", "--devices", "0", "r.toml"], 2),
        (["train", "no.toml"], 2),
    ],
)
def test_exit_codes_of_the_command_line(arguments, code):
    assert omnitrain(*arguments).returncode == code


def test_a_users_mistake_is_short_and_traceback_shows_where(recipe, tmp_path):
    recipe.write_text(RECIPE.replace("learning_rate", "lrr"))
    done = omnitrain("train", "r.toml", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "r.toml:12:1" in done.stderr
    for place in (["--traceback", "train", "r.toml"], ["train", "r.toml", "--traceback"]):
        shown = omnitrain(*place, cwd=tmp_path)
        assert shown.returncode == 2 and "Traceback" in shown.stderr and "r.toml:12:1" in shown.stderr


def test_missing_rows_and_models_are_named_and_nothing_is_written(recipe, tmp_path):
    done = omnitrain("train", "r.toml", cwd=tmp_path)
    assert done.returncode == 1 and "r.toml:7:1" in done.stderr and "t.parquet" in done.stderr
    (tmp_path / "t.parquet").write_text("")
    (tmp_path / "m" / "config.json").unlink()
    done = omnitrain("train", "r.toml", cwd=tmp_path)
    assert done.returncode == 1 and "r.toml:5:1" in done.stderr and "config.json" in done.stderr
    (tmp_path / "m").rmdir()
    done = omnitrain("train", "r.toml", cwd=tmp_path)
    assert done.returncode == 1 and "no such directory" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["r.toml", "t.parquet"]


def test_arguments_after_two_dashes_go_to_torchrun_not_to_the_recipe_list(recipe, tmp_path):
    (tmp_path / "t.parquet").write_text("")
    done = omnitrain("train", "r.toml", "--", "--nproc-per-node", "4", cwd=tmp_path)
    assert done.returncode == 2 and "--devices" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_unexpected_error_is_called_a_bug(monkeypatch, capsys):
    from omnitrain import cli
    from omnitrain.recipe import loader

    monkeypatch.setattr(loader, "load", lambda *arguments: 1 / 0)
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "r.toml"])
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "bug" in err.splitlines()[-1]
    monkeypatch.setattr(loader, "load", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "r.toml"])
    assert ended.value.code == 130


def test_a_path_is_not_taken_for_a_hub_name(recipe, tmp_path):
    (tmp_path / "t.parquet").write_text("")
    for path in ("./m/x", "/no/such", "a/b/c", "nowhere"):
        done = omnitrain("train", "r.toml", "--set", f"model.path={path}", cwd=tmp_path)
        assert done.returncode == 1 and "no such directory" in done.stderr and "hf download" not in done.stderr
    done = omnitrain("train", "r.toml", "--set", "model.path=org/name", cwd=tmp_path, HF_HUB_CACHE=str(tmp_path))
    assert done.returncode == 1 and "`hf download org/name`" in done.stderr


def test_the_help_promises_nothing_that_this_version_lacks():
    text = omnitrain("--help").stdout
    assert "reinforcement learning" in text and "diffusion" not in text and "preferences" not in text


def test_rehearse_refuses_sequences_that_fit_no_micro_batch(recipe, tmp_path):
    (tmp_path / "t.parquet").write_text("")
    online = ["--unset", "algorithm", "--set", "algorithm.kind=gspo", "--set", "rollout={max_new_tokens=15000}"]
    done = omnitrain("rehearse", "r.toml", *online, "--set", 'rewards=[{kind="choice"}]', cwd=tmp_path)
    assert done.returncode == 2 and "= 2048 + 15000 = 17048 is more than" in done.stderr
    assert "train.max_tokens_per_device = 16384" in done.stderr


def test_a_finished_run_says_so_and_starts_no_rank(recipe, tmp_path, monkeypatch, capsys):
    from omnitrain import cli, launch
    from omnitrain.rundir import RunDir, read_exit

    (tmp_path / "t.parquet").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("omnitrain.cli.train.show_summary", lambda *arguments, **options: None)
    started = []
    monkeypatch.setattr(launch, "launch", lambda *arguments, **options: started.append(arguments) or 0)

    def train() -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "r.toml", "--run-dir", "run"])
        assert not ended.value.code

    train()
    assert len(started) == 1
    started[0][0].unlock()
    saved = tmp_path / "run" / "checkpoints" / "step_9"
    saved.mkdir()
    (saved / "manifest.json").write_text('{"files": {}}')
    train()
    assert len(started) == 2  # one step is left of ten
    started[1][0].unlock()
    saved.rename(saved.with_name("step_10"))
    train()
    assert len(started) == 2 and "finished already: 10 of 10 steps" in capsys.readouterr().out
    assert read_exit(RunDir(tmp_path / "run")) == (0, "")
