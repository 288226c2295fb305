"""What a run says while it goes on and at its end."""

from types import SimpleNamespace

import pytest

from omnitrain.train import console as module
from omnitrain.train.console import Console
from omnitrain.train.context import Context
from omnitrain.train.notices import Notices


@pytest.fixture
def clock(monkeypatch):
    """A clock set by hand; the output is no terminal."""
    now = SimpleNamespace(value=1000.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.value)
    return now


def test_a_long_wait_is_told_with_its_step_and_seconds_every_30_seconds(clock, capsys):
    console = Console()
    console.begin("step 4")
    for done in range(1, 71):
        clock.value += 1
        console.beat(f"sampled {done} of 256")
    assert capsys.readouterr().out.splitlines() == [
        "step 4: sampled 31 of 256, 31 s",
        "step 4: sampled 62 of 256, 62 s",
    ]


def test_a_new_wait_starts_its_own_30_seconds(clock, capsys):
    console = Console()
    clock.value += 3600
    console.begin("step 4")
    console.beat("sampled 1 of 8")
    clock.value += 29
    console.begin("step 4")
    clock.value += 29
    console.beat("scored 1 of 8")
    assert capsys.readouterr().out == ""


def _told(lines, end=True):
    said = []
    notices = Notices(said.append)
    for line in lines:
        notices.step(line)
    if end:
        notices.end()
    return said


def _step(zero_std, gradient=1.0):
    return {"train/zero_std_ratio": zero_std, "train/grad_norm": gradient}


def test_steps_without_a_difference_in_any_group_are_told_once_and_only_three_in_a_row():
    (line,) = _told([_step(1.0)] * 3 + [_step(0.5)] + [_step(1.0)] * 5)
    assert "for 3 steps: nothing is learned; see docs/rewards.md" in line
    assert _told([_step(1.0), _step(1.0), _step(0.9), _step(1.0), _step(1.0)]) == []


def _mixed(measure, **modalities):
    return _step(0.5) | {f"modality/{name}/{measure}": value for name, value in modalities.items()}


def test_a_modality_whose_rewards_stay_equal_is_told_once_while_others_differ():
    flat, varied = (_mixed("zero_std_ratio", video=video, text=0.5) for video in (1.0, 0.9))
    absent = _mixed("zero_std_ratio", text=0.5, image=0.2)  # a step without videos says nothing about them
    (line,) = _told([flat] * 5 + [absent] + [flat] * 20)
    assert line.startswith("warning: video: in each group all rewards were equal, for 10 steps")
    assert _told([flat] * 9 + [varied] + [flat] * 9) == []
    assert _told([_mixed("zero_std_ratio", video=1.0, text=1.0)] * 20) == []  # then none is fine
    assert _told([flat | {"train/overlong_penalty": -0.1}] * 20) == []


def test_a_modality_on_which_engine_and_trainer_part_is_told_once_while_others_agree():
    apart = _mixed("pearson", video=0.61, audio=0.97, text=0.999)
    (line,) = _told([apart] * 2 + [_mixed("pearson", text=0.999, video=0.99)] + [apart] * 5)
    assert line == (
        "warning: video: Pearson of engine and trainer is 0.610, elsewhere up to 0.999, for 3 steps; see `omnitrain explain g6`"
    )
    assert _told([apart] * 2) == []
    assert _told([_mixed("pearson", video=0.6, text=0.7)] * 5) == []  # rollout/pearson says so of all
    assert _told([_mixed("pearson", video=float("nan"), text=0.999)] * 5) == []


def test_a_run_whose_gradients_were_all_zero_says_so_at_its_end():
    assert _told([_step(0.0, 0.0)] * 2) == [
        "warning: the gradient was zero in every step: the update was not exercised"
    ]
    assert _told([_step(0.0, 0.0)] * 2, end=False) == []
    assert _told([_step(0.0, 0.0), _step(0.0, 1e-9)]) == []
    assert _told([{"step": 0, "val/avqa/loss": 1.0}]) == []  # validation alone is no step


@pytest.mark.parametrize("online, kinds", [(True, "metrics, samples, checkpoints"), (False, "metrics, checkpoints")])
def test_the_last_line_names_the_run_directory(tmp_path, capsys, online, kinds):
    recipe = SimpleNamespace(algorithm=SimpleNamespace(online=online))
    run = SimpleNamespace(path=tmp_path)
    context = Context(recipe, run, *[None] * 6, Console(), None, None)
    context.finish(10, 40)
    assert capsys.readouterr().out == f"done: 10 steps, 40 updates; {kinds} and plots in {tmp_path}\n"
