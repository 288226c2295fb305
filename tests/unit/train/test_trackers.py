"""Trackers are optional: none of their troubles stops a run."""

from types import SimpleNamespace

from omnitrain.train import trackers
from omnitrain.train.trackers import Sinks, build_sinks


class Failing:
    def log(self, step, values):
        raise ConnectionError("no route to host")

    def close(self):
        raise ConnectionError("no route to host")


class Kept:
    def __init__(self):
        self.seen, self.closed = [], False

    def log(self, step, values):
        self.seen.append(step)

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(capsys):
    kept = Kept()
    sinks = Sinks([Failing(), kept])
    sinks.log(1, {})
    sinks.log(2, {})
    sinks.close()
    assert kept.seen == [1, 2] and kept.closed
    assert capsys.readouterr().err.count("Failing failed and is left out") == 1


def test_a_tracker_that_cannot_be_closed_does_not_make_a_finished_run_a_failure(capsys):
    kept = Kept()
    Sinks([Failing(), kept]).close()
    assert kept.closed and "could not be closed: no route to host" in capsys.readouterr().err


def test_a_tracker_that_cannot_be_started_is_left_out_with_a_warning(monkeypatch, tmp_path, capsys):
    def unreachable(*_):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(trackers, "WandbRun", unreachable)
    recipe = SimpleNamespace(trackers=SimpleNamespace(tensorboard=False, wandb=SimpleNamespace(project="p")))
    build_sinks(recipe, tmp_path).log(1, {})
    assert "could not be started and is left out: no route to host" in capsys.readouterr().err
