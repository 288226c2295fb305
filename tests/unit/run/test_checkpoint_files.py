"""Checkpoints on one process: what counts as whole, what is kept, what a full disk or a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from omnitrain.errors import ModelError, RunError
from omnitrain.rundir import MANIFEST
from omnitrain.train.checkpoint import Checkpointer, load_trainable


def parts(width: int = 8):
    net = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)


def update(net, optimizer) -> None:
    net(torch.ones(1, net.in_features)).sum().backward()
    optimizer.step()


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpointer(tmp_path):
    return Checkpointer(tmp_path / "checkpoints", keep_last=2, say=lambda line: None)


@pytest.mark.parametrize(
    "damage", ["no manifest", "manifest cut short", "a file cut short", "a file gone", "not renamed"]
)
def test_p5_a_half_written_or_damaged_checkpoint_is_skipped_and_said(tmp_path, damage):
    said = []
    checkpointer = Checkpointer(tmp_path, say=said.append)
    for step in (1, 2):
        checkpointer.save(step, *parts(), extra={})
    broken = tmp_path / "step_2"
    data = next(broken.glob("*.distcp"))
    if damage == "no manifest":
        (broken / MANIFEST).unlink()
    elif damage == "manifest cut short":
        (broken / MANIFEST).write_text((broken / MANIFEST).read_text()[:-20])
    elif damage == "a file cut short":
        os.truncate(data, data.stat().st_size - 1)
    elif damage == "a file gone":
        data.unlink()
    else:
        broken.rename(tmp_path / ".tmp_step_2")
    assert checkpointer.latest() == tmp_path / "step_1"
    assert len(said) == 1 and "step_2" in said[0] and "skipped" in said[0]


def test_p5_kill_9_while_saving_leaves_a_whole_checkpoint(tmp_path):
    code = (
        "import torch; from pathlib import Path; from tests.unit.run.test_checkpoint_files import parts\n"
        "from omnitrain.train.checkpoint import Checkpointer\n"
        f"c = Checkpointer(Path({str(tmp_path)!r}), keep_last=2); p = parts(400)\n"
        "for step in range(10**6): c.save(step, *p, extra={}); print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.strip() == "3":
            break
    time.sleep(0.013)
    process.send_signal(signal.SIGKILL)
    done = [int(line) for line in process.communicate()[0].split()]
    newest = Checkpointer(tmp_path, say=lambda line: None).latest()
    assert int(newest.name.removeprefix("step_")) >= max([3, *done])
    load_trainable(newest, parts(400)[0])


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_best=("val/a/accuracy", "max"))
    for step, value in enumerate([0.1, 0.9, 0.3, None, 0.4]):
        metrics = {} if value is None else {"val/a/accuracy": value, "name": "text is not a metric"}
        checkpointer.save(step, *parts(), extra={}, metrics=metrics)
    assert names(tmp_path) == ["step_1", "step_3", "step_4"]


def test_saving_a_step_again_replaces_it(checkpointer):
    checkpointer.save(1, *parts(), extra={"try": 1})
    path = checkpointer.save(1, *parts(), extra={"try": 2})
    assert checkpointer.load(path, *parts()) == {"try": 2}
    assert names(checkpointer.directory) == ["step_1"]


def test_a_checkpoint_before_the_first_update_resumes_to_the_same_first_update(checkpointer):
    net, optimizer, scheduler = parts()
    path = checkpointer.save(0, net, optimizer, scheduler, extra={})
    again, its_optimizer, its_scheduler = parts()
    update(again, its_optimizer)
    checkpointer.load(path, again, its_optimizer, its_scheduler)
    its_optimizer.zero_grad()
    update(net, optimizer)
    update(again, its_optimizer)
    assert torch.equal(net.weight, again.weight)


def test_g10_before_the_first_update_leaves_the_optimizer_untouched(checkpointer):
    net, optimizer, _ = parts()
    before = net.weight.clone()
    assert checkpointer.round_trip(net, optimizer).unequal == []
    assert not optimizer.state and torch.equal(net.weight, before) and net.weight.grad is None


def test_g10_names_what_came_back_changed(checkpointer, monkeypatch):
    from omnitrain.train import checkpoint

    def read(state, folder):
        _read(state, folder)
        state["model"]["bias"][0] = -0.0

    _read = checkpoint._read
    monkeypatch.setattr(checkpoint, "_read", read)
    net, optimizer, _ = parts()
    nn.init.zeros_(net.bias)
    assert checkpointer.round_trip(net, optimizer).unequal == ["model/bias"]


def test_a_checkpoint_of_other_parameters_names_them(checkpointer):
    path = checkpointer.save(1, *parts(), extra={})
    with pytest.raises(RunError, match=r"weight has shape \(8, 8\), here \(9, 9\)"):
        checkpointer.load(path, *parts(9))
    with pytest.raises(ModelError, match="0.weight is not in it"):
        load_trainable(path, nn.Sequential(nn.Linear(8, 8)))


def test_init_from_a_directory_without_a_whole_checkpoint_says_so(tmp_path):
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    with pytest.raises(ModelError, match="no whole checkpoint; skipped .*step_5 has no manifest"):
        load_trainable(tmp_path, parts()[0])


@pytest.mark.parametrize("action", ["save", "round_trip"])
def test_a_full_disk_names_the_free_space_and_leaves_the_earlier_checkpoint(tmp_path, action):
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        checkpointer = Checkpointer(tmp_path, say=lambda line: None)
        small = parts(100)
        checkpointer.save(1, *small, extra={})
        net, optimizer, scheduler = parts(200)
        update(net, optimizer)
        with pytest.raises(RunError, match=r"no space .* it needs 0.5 MiB, 0.\d MiB are free .*step_1"):
            checkpointer.save(2, net, optimizer, scheduler, {}) if action == "save" else checkpointer.round_trip(
                net, optimizer
            )
        assert names(tmp_path) == ["step_1"]
        checkpointer.load(checkpointer.latest(), *small)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_checkpoint_holds_no_code(checkpointer, tmp_path):
    path = checkpointer.save(1, *parts(), extra={})
    torch.save({"extra": os.system}, path / "extra.pt")
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["extra.pt"] = (path / "extra.pt").stat().st_size
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Exception, match="[Ww]eights.only"):
        checkpointer.load(path, *parts())
