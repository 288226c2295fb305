"""The run directory: lock, resume, refusal of another recipe, fresh starts, what is discarded."""

import errno
import json
import os
import subprocess
import sys

import pytest

from omnitrain.errors import UsageError, environment_fault
from omnitrain.recipe.loader import load
from omnitrain.rundir import (
    RunDir,
    latest_checkpoint,
    read_exit,
    request_stop,
    stop_requested,
    write_atomic,
    write_exit,
)

RECIPE = """
name = "r"
[model]
family = "qwen3_omni"
path = "m"
[data]
train = "t.parquet"
[algorithm]
kind = "sft"
[train]
prompts_per_step = 4
learning_rate = 1e-3
max_steps = 10
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    return lambda *sets: load([path], list(sets)).recipe


@pytest.fixture
def run(tmp_path):
    """A function that gives a new RunDir on the same directory, as each command does; the locks are given up at the end."""
    made = []

    def run():
        for other in made:
            other.unlock()
        made.append(RunDir(tmp_path / "runs" / "r"))
        return made[-1]

    yield run
    for other in made:
        other.unlock()


def checkpoint(run: RunDir, step: int) -> None:
    folder = run.checkpoints / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "data").write_text("1234")
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {"data": 4}}))


def test_a_new_run_writes_a_recipe_that_loads_to_the_same(run, recipe):
    place = run()
    prepared = place.prepare(recipe())
    assert not prepared.resumed and prepared.step is None
    assert place.recipe() == recipe()


def test_two_runs_in_one_directory_name_the_process_that_has_it(run, recipe, tmp_path):
    place = run()
    place.prepare(recipe())
    with pytest.raises(UsageError, match=f"is in use: process {os.getpid()} on "):
        RunDir(place.path).prepare(recipe())


def test_the_lock_of_a_killed_process_is_free(run, recipe):
    place = run()
    place.prepare(recipe())
    place.unlock()
    code = (
        f"from omnitrain.rundir import RunDir; import os; RunDir({str(place.path)!r}).lock(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert run().lock()


def test_another_process_of_the_same_launch_waits_for_the_first(run, recipe):
    place = run()
    place.prepare(recipe(), token="host:1 id")
    assert RunDir(place.path).prepare(recipe(), token="host:1 id").resumed
    with pytest.raises(UsageError, match="in use"):
        RunDir(place.path).prepare(recipe(), token="host:2 other")


def test_p6_the_same_recipe_resumes_after_the_newest_whole_checkpoint(run, recipe):
    run().prepare(recipe())
    place = run()
    checkpoint(place, 4)
    checkpoint(place, 6)
    checkpoint(place, 10)
    (place.checkpoints / "step_10" / "data").write_text("12")
    prepared = place.prepare(recipe())
    assert prepared.resumed and prepared.step == 6
    assert any("step_10 is damaged: data has 2 bytes instead of 4" in note for note in prepared.notes)
    assert latest_checkpoint(place.checkpoints)[0].name == "step_6"


def test_p6_a_changed_recipe_is_refused_field_by_field_and_nothing_changes(run, recipe):
    run().prepare(recipe())
    place = run()
    place.metrics.write_text('{"step": 1}\n')
    with pytest.raises(UsageError) as caught:
        place.prepare(recipe("train.learning_rate=2e-3", "train.prompts_per_step=8"))
    text = str(caught.value)
    assert "train.learning_rate: 0.001 -> 0.002" in text and "train.prompts_per_step: 4 -> 8" in text
    assert "--allow-change" in text and "--fresh" in text
    assert place.recipe() == recipe() and place.metrics.read_text() == '{"step": 1}\n'
    assert run().lock()


def test_a_run_that_failed_before_its_first_step_takes_the_mended_recipe(run, recipe):
    run().prepare(recipe())
    notes = run().prepare(recipe("model.path=other")).notes
    assert "changed: model.path = 'other' (was 'm')" in notes
    assert run().recipe().model.path == "other"


def test_a_directory_that_cannot_be_made_is_named(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/run cannot be made: Not a directory; choose another --run-dir"):
        RunDir(tmp_path / "file" / "run").prepare(recipe())


def test_a_full_disk_leaves_no_half_written_file_and_is_named(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "recipe.toml"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_atomic(path, "new")
    assert environment_fault(caught.value) == f"{path}: no space left; make room there"
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.toml"] and path.read_text() == "old"


def test_an_allowed_or_harmless_change_is_written_and_the_old_recipe_kept(run, recipe):
    run().prepare(recipe())
    run().prepare(recipe("train.max_steps=20"))
    place = run()
    notes = place.prepare(recipe("train.max_steps=20", "seed=7"), allow_change=True).notes
    assert "changed: seed = 7 (was 0)" in notes
    assert place.recipe().seed == 7
    assert load([place.logs / "recipe-2.toml"]).recipe.train.max_steps == 20


@pytest.mark.parametrize("change", ["seed=7", "data.shuffle=false", 'data.train_weights=[2]'])
def test_p6_what_fixes_the_draw_of_rows_cannot_change_after_a_checkpoint(run, recipe, change):
    run().prepare(recipe())
    place = run()
    checkpoint(place, 3)
    with pytest.raises(UsageError, match=f"{change.split('=')[0]} cannot change in a run that has begun.*--fresh"):
        place.prepare(recipe(change), allow_change=True)
    assert place.recipe() == recipe()


def test_changed_paths_are_shown_as_text(run, recipe):
    run().prepare(recipe())
    place = run()
    checkpoint(place, 3)
    with pytest.raises(UsageError, match=r"data.train: '[^']*' -> \['/a', '/b'\]"):
        place.prepare(recipe('data.train=["/a","/b"]'))


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(run, recipe):
    first = run()
    first.prepare(recipe())
    checkpoint(first, 3)
    for number in (1, 2):
        place = run()
        prepared = place.prepare(recipe(f"seed={number}"), fresh=True)
        assert not prepared.resumed and f"r.old-{number}" in prepared.notes[0]
        with pytest.raises(UsageError, match="in use"):
            RunDir(place.path).lock()
    assert (place.path.with_name("r.old-1") / "checkpoints" / "step_3" / "manifest.json").exists()
    assert load([place.path.with_name("r.old-2") / "recipe.toml"]).recipe.seed == 1
    assert sorted(path.name for path in place.path.parent.iterdir()) == ["r", "r.old-1", "r.old-2"]


def test_what_was_written_after_the_checkpoint_is_moved_not_lost(run, recipe):
    run().prepare(recipe())
    place = run()
    checkpoint(place, 2)
    lines = [json.dumps({"step": step}) + "\n" for step in (0, 1, 2, 3)]
    place.metrics.write_text("".join(lines) + '{"step": 4, "lo')
    for step in (1, 3):
        (place.samples / f"step_{step}").mkdir()
    (place.discarded / "samples" / "step_3").mkdir(parents=True)
    place.prepare(recipe())
    assert place.metrics.read_text() == "".join(lines[:3])
    assert (place.discarded / "metrics.jsonl").read_text() == lines[3] + '{"step": 4, "lo\n'
    assert [path.name for path in place.samples.iterdir()] == ["step_1"]
    assert sorted(path.name for path in (place.discarded / "samples").iterdir()) == ["step_3", "step_3.2"]


def test_without_a_checkpoint_everything_is_discarded(run, recipe):
    run().prepare(recipe())
    place = run()
    place.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    assert place.prepare(recipe()).step is None
    assert place.metrics.read_text() == ""
    assert len((place.discarded / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("what", ["file", "other directory"])
def test_a_place_that_is_no_run_directory_is_refused_and_untouched(run, recipe, what):
    place = run()
    place.path.parent.mkdir(parents=True)
    if what == "file":
        place.path.write_text("")
    else:
        place.path.mkdir()
        (place.path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="is a file" if what == "file" else "not a run directory .it has thesis.tex"):
        place.prepare(recipe())
    assert what == "file" or os.listdir(place.path) == ["thesis.tex"]


def test_a_stop_and_an_exit_of_the_last_run_do_not_reach_the_next(run, recipe):
    place = run()
    place.prepare(recipe())
    assert stop_requested(place) is None and read_exit(place) is None
    request_stop(place, "update")
    write_exit(place, 3, "gate G5")
    assert stop_requested(place) == "update" and read_exit(place) == (3, "gate G5")
    place = run()
    place.prepare(recipe())
    assert stop_requested(place) is None and read_exit(place) is None
