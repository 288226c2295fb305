"""Train the small sharded module with a moving average, interrupted or not. `average.py ACTION DIR`, under torchrun or alone.

"whole": six updates. "first": three, then a checkpoint. "second": the other three, from the checkpoint.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from omnitrain.recipe.schema import Ema as EmaSettings
from omnitrain.train.checkpoint import Checkpointer
from omnitrain.train.ema import Ema
from tests.integration.workers.sharded import build, full


def main(action: str, folder: Path) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    net, optimizer, scheduler = build(seed=1)
    if action == "second":  # other weights, for the checkpoint to replace; frozen ones are not in it
        with torch.no_grad():
            [p.add_(1.0) for p in net.parameters() if p.requires_grad]
    ema = Ema(net, EmaSettings(decay=0.5, every=2))
    checkpointer = Checkpointer(folder / "checkpoints", say=lambda line: None)
    updates = {"whole": range(6), "first": range(3), "second": range(3, 6)}[action]
    if action == "second":
        extra = checkpointer.load(checkpointer.latest(), net, optimizer, scheduler, ema.averages)
        ema.updates = extra["ema"]
    expected = {name: value.clone() for name, value in ema.averages.items()}
    for update in updates:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(update))
        net(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ema.update()
        if (update + 1) % 2 == 0:
            for name, parameter in named(net).items():
                expected[name] = 0.5 * expected[name] + 0.5 * parameter.detach()
    if action == "first":
        checkpointer.save(3, net, optimizer, scheduler, {"ema": ema.updates}, averages=ema.averages)
    before = {name: full(p.detach()).clone() for name, p in named(net).items()}
    with ema.swapped():
        inside = {name: full(p.detach()).clone() for name, p in named(net).items()}
        with torch.no_grad():
            answer = net(torch.ones(1, 6)).tolist()
    result = {
        "averages": {name: full(value).tolist() for name, value in ema.averages.items()},
        "closed form": all(torch.allclose(full(expected[n]), full(v), atol=1e-6) for n, v in ema.averages.items()),
        "inside": all(torch.equal(inside[name], full(value)) for name, value in ema.averages.items()),
        "back": all(torch.equal(before[name], full(p.detach())) for name, p in named(net).items()),
        "moved": any(not torch.equal(before[name], inside[name]) for name in before),
        "answer": answer,
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("RESULT" + json.dumps(result))


def named(net) -> dict:
    for part in net.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
