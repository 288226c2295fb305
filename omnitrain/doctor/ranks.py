"""Two ranks that talk to each other, started as a run starts its own.

As a module (`python -m omnitrain.doctor.ranks`, under torchrun) it is one of the ranks.
"""

from __future__ import annotations

import time

from omnitrain.doctor.check import OK, PROBLEM, Check, Finding, run_python
from omnitrain.launch import environment, visible_accelerators

_MARK = "PING"


def checks() -> list[Check]:
    """The checks of this file."""
    return [Check("two ranks", two_ranks)]


def two_ranks(timeout: float = 120.0) -> Finding:
    """Start two ranks with torchrun and sum a tensor across them."""
    found = visible_accelerators()
    # Two ranks cannot share an accelerator in NCCL: with fewer than two the ping is the CPU's.
    hidden = {} if found.count >= 2 else {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    kind = found.kind if found.count >= 2 else "cpu"
    start = time.perf_counter()
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "omnitrain.doctor.ranks"]
    outcome = run_python(arguments, timeout=timeout, env=environment(kind) | hidden)
    marks = sorted(line for line in outcome.out.splitlines() if line.startswith(_MARK))
    if outcome.code == 0 and len(marks) == 2:
        backend = marks[0].split()[1]
        return Finding("two ranks", OK, f"{backend}, {time.perf_counter() - start:.0f} s with their start")
    fix = "export NCCL_DEBUG=INFO NCCL_CUMEM_ENABLE=0" if kind == "cuda" else "export GLOO_SOCKET_IFNAME=lo"
    return Finding("two ranks", PROBLEM, f"torchrun with two ranks: {outcome.reason()}", fix)


def main() -> None:
    """One rank: all-reduce on the device, check the sum, say so."""
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from omnitrain import device as devices

    device = devices.current_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(devices.backend(device), timeout=timedelta(seconds=60))
    value = torch.full((4,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(value)
    if value.tolist() != [3.0] * 4:
        raise RuntimeError(f"the sum over two ranks is {value.tolist()}, not 3")
    dist.barrier()
    os.write(1, f"{_MARK} {devices.backend(device)} {dist.get_rank()}\n".encode())  # one write: lines of ranks do not mix
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
