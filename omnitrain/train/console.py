"""What rank 0 prints while it trains."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


class Console:
    """One line per step, and on a terminal a line that says what is going on now."""

    def __init__(self, total_steps: int = 0, quiet: bool = False) -> None:
        self.total_steps = total_steps
        self._quiet = quiet
        self._live = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._phase = ""
        self._phase_start = self._last_beat = time.monotonic()
        self._started = time.monotonic()
        self._first_step: int | None = None

    def say(self, text: str) -> None:
        """One line that stays."""
        if not self._quiet:
            print(("\r\x1b[K" if self._live else "") + text, flush=True)

    def begin(self, phase: str) -> None:
        """A wait begins, of which the next beats tell; `phase` says where the run is, as "step 4"."""
        self._phase = phase
        self._phase_start = self._last_beat = time.monotonic()

    def beat(self, text: str) -> None:
        """How far the wait is: in place on a terminal; elsewhere every 30 seconds, so a short wait prints nothing."""
        if self._quiet:
            return
        now = time.monotonic()
        text = f"{self._phase}: {text}, {now - self._phase_start:.0f} s"
        if self._live and now - self._last_beat > 0.1:
            print(f"\r\x1b[K{text}", end="", flush=True)
            self._last_beat = now
        elif not self._live and now - self._last_beat > 30:
            print(text, flush=True)
            self._last_beat = now

    def step(self, values: dict[str, Any]) -> None:
        """The step's line."""
        step = values["step"]
        parts = [f"step {step}/{self.total_steps}"]
        for label, name, form in (
            ("reward", "train/reward_mean", "{:.3f}"),
            ("±", "train/reward_std", "{:.3f}"),
            ("zero-std", "train/zero_std_ratio", "{:.2f}"),
            ("loss", "train/loss", "{:.4f}"),
            ("pairs right", "train/dpo_accuracy", "{:.2f}"),
            ("margin", "train/dpo_margin", "{:.3f}"),
            ("pearson", "rollout/pearson", "{:.5f}"),
            ("grad", "train/grad_norm", "{:.3g}"),
            ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
        ):
            value = values.get(name)
            if isinstance(value, (int, float)):
                parts.append(f"{label} {form.format(value)}")
        # Where the tasks have a total, it stands for them: by modality the line would fill the screen.
        shown = "val/all/" if "val/all/loss" in values else "val/"
        parts += [
            f"{name.split('/', 1)[1]} {value:.3f}"
            for name, value in values.items()
            if name.startswith(shown) and not name.endswith("/rows") and isinstance(value, float)
        ]
        if "time/step" in values:
            parts.append(f"{values['time/step']:.1f}s")
            if self._first_step is None:
                self._first_step, self._started = step, time.monotonic()
            elif self.total_steps > step:
                each = (time.monotonic() - self._started) / (step - self._first_step)
                parts.append(f"eta {_duration(each * (self.total_steps - step))}")
        self.say("  ".join(parts))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
