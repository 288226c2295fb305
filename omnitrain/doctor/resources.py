"""What the machine has left: memory, shared memory, disk, open files."""

from __future__ import annotations

import shutil
from pathlib import Path

from omnitrain.doctor.check import OK, PROBLEM, WARNING, Check, Finding

GIB = 2**30


def checks(where: Path) -> list[Check]:
    """The checks of this file. `where` is the directory that runs are written to."""
    return [
        Check("memory", memory),
        Check("disk", lambda: disk(where)),
        Check("shared memory", shared_memory),
        Check("open files", open_files),
    ]


def memory() -> Finding:
    """Host memory that is free, and the fix when two ranks of a tiny model would not fit."""
    import psutil

    found = psutil.virtual_memory()
    detail = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB free"
    if found.available < 2 * GIB:
        return Finding("memory", PROBLEM, f"{detail}; a tiny run needs 2 GiB", "ps aux --sort=-rss | head")
    if found.available < 6 * GIB:
        return Finding("memory", WARNING, f"{detail}; two ranks with engines need about 6 GiB", "ps aux --sort=-rss | head")
    return Finding("memory", OK, detail)


def disk(where: Path) -> Finding:
    """Free space where runs are written."""
    where = next(p for p in (where.resolve(), *where.resolve().parents) if p.exists())
    found = shutil.disk_usage(where)
    detail = f"{found.free / GIB:.1f} of {found.total / GIB:.1f} GiB free at {where}"
    if found.free < GIB:
        return Finding("disk", PROBLEM, f"{detail}; checkpoints will not fit", f"du -xh {where} | sort -h | tail")
    if found.free < 10 * GIB:
        return Finding("disk", WARNING, f"{detail}; checkpoints are large", f"du -xh {where} | sort -h | tail")
    return Finding("disk", OK, detail)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Shared memory: NCCL and the engine's workers put buffers there."""
    if not path.is_dir():
        return Finding("shared memory", OK, f"no {path} on this system")
    found = shutil.disk_usage(path)
    detail = f"{found.free / GIB:.2f} GiB free in {path}"
    if found.free < GIB // 4:
        return Finding("shared memory", WARNING, f"{detail}; NCCL may fail", f"mount -o remount,size=2G {path}")
    return Finding("shared memory", OK, detail)


def open_files() -> Finding:
    """The limit of open files: sharded checkpoints and media readers use hundreds."""
    try:
        import resource
    except ImportError:
        return Finding("open files", OK, "no limit on this system")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 1024:
        return Finding("open files", WARNING, f"limit {soft}", "ulimit -n 4096")
    return Finding("open files", OK, f"limit {soft if soft >= 0 else 'none'}")
