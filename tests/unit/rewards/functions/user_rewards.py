"""A user's module of reward functions, well-behaved and not."""

import ctypes
import os
import subprocess
import sys
import time


def length(response, row):
    return len(response)


def meta_weight(response, row):
    return row["meta"]["weight"]


def modules(response, row):
    return sum(name in sys.modules for name in ("torch", "vllm", "transformers", "pydantic"))


def slow(response, row):
    time.sleep(float(response))
    return 1.0


def hang(response, row):
    """Hangs when told to, and no signal but SIGKILL ends it."""
    if response == "hang":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    return 1.0


def hang_with_child(response, row):
    child = subprocess.Popen(["sleep", "600"])
    with open(response, "w") as file:
        file.write(f"{child.pid}")
    time.sleep(600)


def orphan(response, row):
    """Dies, while a child of its own keeps the pipe open."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
    with open(response, "w") as file:
        file.write(f"{child}")
    os._exit(9)


def odd(response, row):
    """Returns, or does, what the response names."""
    import numpy as np

    results = {
        "none": None,
        "nan": float("nan"),
        "inf": float("-inf"),
        "text": "1.0",
        "list": [1.0, 2.0],
        "list of one": [1.0],
        "array": np.ones(3),
        "dict": {"score": 1.0},
        "bool": True,
        "int": 2,
        "numpy": np.float32(0.5),
        "numpy array of no dimension": np.array(0.5),
    }
    if response == "raise":
        raise KeyError("no such colour")
    if response == "exit":
        sys.exit(3)
    if response == "die":
        print("about to die", file=sys.stderr, flush=True)
        os._exit(7)
    if response == "segfault":
        ctypes.string_at(0)
    return results.get(response, 1.0)


def write(response, row):
    print("printed by a reward")
    return 1.0


not_callable = 3


def _meet(folder, mine, others):
    open(os.path.join(folder, mine), "w").close()
    while not all(os.path.exists(os.path.join(folder, other)) for other in others):
        time.sleep(0.02)
    return 1.0


def meet(response, row):
    """Ends when `meet_second` and the scorer behind HTTP have begun, too."""
    return _meet(response, "python", ["second", "http"])


def meet_second(response, row):
    return _meet(response, "second", ["python", "http"])
