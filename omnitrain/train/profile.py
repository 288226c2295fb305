"""`[profile]`: where a step's time and memory go. Without the table nothing here runs.

Writes RUN/profile/step_N_rank_R.json.gz (a Chrome trace, for Perfetto), .txt (the costliest operators) and, where
the device can, .memory.pickle (who allocated what). The phases of `Clock.phase` appear in the trace by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from omnitrain import device as devices
from omnitrain.recipe.schema import Profile
from omnitrain.train.distributed import Ranks

OPERATORS = 30
"""Lines of the table of operators."""

_NO_RANGE = nullcontext()
_makers: list[Callable[[str], AbstractContextManager]] = []


def phase_range(name: str) -> AbstractContextManager:
    """A named range around a phase, for whoever watches; one shared null object when nobody does."""
    if not _makers:
        return _NO_RANGE
    stack = ExitStack()
    for maker in _makers:
        stack.enter_context(maker(name))
    return stack


class Profiler:
    """Profiles the steps that the recipe names, on one rank. `with profiler:` around all steps, `step(n)` around each."""

    def __init__(self, spec: Profile | None, folder: Path, ranks: Ranks, say: Callable[[str], None]) -> None:
        self._spec, self._folder, self._rank, self._device, self._say = spec, folder, ranks.rank, ranks.device, say
        self._nvtx = lambda name: devices.named_range(name, ranks.device)

    def __enter__(self) -> "Profiler":
        spec = self._spec
        if spec is None:
            return self
        if spec.memory and not devices.can_record_memory(self._device):
            self._say(f"profile.memory: a {self._device.type} keeps no record of allocations; it needs a GPU, and is left out")
        if spec.nvtx and self._device.type != "cuda":
            self._say(f"profile.nvtx: there is no NVTX on a {self._device.type}; it needs a GPU, and is left out")
        elif spec.nvtx:
            _makers.append(self._nvtx)
        return self

    def __exit__(self, *error) -> None:
        if self._nvtx in _makers:
            _makers.remove(self._nvtx)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step. What was gathered is written however the step ends: an out-of-memory is why one looks."""
        if self._spec is None or number not in self._spec.steps:
            yield
            return
        name = f"step_{number}_rank_{self._rank}"
        if self._spec.memory:
            devices.record_memory(self._device)
        watch = torch.profiler.profile(record_shapes=True, profile_memory=self._spec.memory)
        _makers.append(torch.profiler.record_function)
        try:
            with watch:
                yield
        finally:
            _makers.remove(torch.profiler.record_function)
            self._write(watch, name)

    def _write(self, watch: torch.profiler.profile, name: str) -> None:
        """A full disk must not end the run, nor hide why a step failed."""
        try:
            self._folder.mkdir(exist_ok=True)
            watch.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            by = f"self_{'cpu' if self._device.type == 'cpu' else 'device'}_time_total"
            table = watch.key_averages().table(sort_by=by, row_limit=OPERATORS, max_name_column_width=60)
            (self._folder / f"{name}.txt").write_text(table)
            if self._spec.memory:
                devices.write_memory(self._device, self._folder / f"{name}.memory.pickle")
        except OSError as error:
            self._say(f"warning: the profile {name} could not be written: {error}")
            return
        self._say(f"profile of this step: {self._folder / name}.json.gz (Perfetto), .txt")
