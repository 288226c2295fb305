"""Resuming must not need more memory than training did: nothing is held twice while a checkpoint is read."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
PROGRAM = """
import resource, sys, warnings
from pathlib import Path
import torch
from torch import nn
from omnitrain.train.checkpoint import Checkpointer

warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])  # 64 MiB, 192 with AdamW's moments
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
checkpointer = Checkpointer(Path(sys.argv[2]), say=lambda text: None)
if sys.argv[1] == "resume":
    checkpointer.load(checkpointer.latest(), net, optimizer, scheduler)
for _ in range(2):
    net(torch.randn(8, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "fresh":
    checkpointer.save(1, net, optimizer, scheduler, {})
print(peak)
"""


def peak_mib(action: str, folder) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM, action, folder], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


def test_s12_resuming_peaks_no_higher_than_a_fresh_start(tmp_path):
    fresh = peak_mib("fresh", str(tmp_path))
    assert peak_mib("resume", str(tmp_path)) <= 1.05 * fresh
