"""The run directory: who may write it, what it holds, how a run is resumed, stopped and ended. Imports no torch.

runs/<name>/  recipe.toml  metrics.jsonl  samples/step_N/  checkpoints/step_N/  logs/  plots/  discarded/
              lock  stop  exit.json
"""

import fcntl
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnitrain.errors import RecipeError, RunError, UsageError

MANIFEST = "manifest.json"


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk's error names no file


@dataclass
class Prepared:
    """What `RunDir.prepare` found."""

    resumed: bool
    """The directory held this run already."""

    step: int | None = None
    """Step of the checkpoint that the run goes on from; None starts at the beginning."""

    notes: list[str] = field(default_factory=list)
    """Lines for the screen: what was moved, skipped, changed."""


class RunDir:
    """Paths of one run, its lock, and its preparation. Making the object touches nothing."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.recipe_file = self.path / "recipe.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.plots = self.path / "plots"
        self.profile = self.path / "profile"
        self.discarded = self.path / "discarded"
        self.lock_file = self.path / "lock"
        self.stop_file = self.path / "stop"
        self.exit_file = self.path / "exit.json"
        self.reference = self.path / "reference.json"
        self.starting_adapter = self.path / "starting_adapter"
        self.lock_descriptor: int | None = None

    def recipe(self):
        """The run's resolved Recipe."""
        from omnitrain.recipe.loader import load

        return load([self.recipe_file]).recipe

    def resumes(self) -> bool:
        """Whether a launch goes on from a checkpoint here: then nothing that the run once started from is needed."""
        return latest_checkpoint(self.checkpoints)[0] is not None

    # ---- the lock

    def lock(self, token: str | None = None) -> bool:
        """Take the run's lock; it lasts until this process, and those that inherit the descriptor, end.

        `token` names a launch that spans several processes (nodes, or ranks of an outer torchrun): one of them gets the
        lock, and False tells the others that a process of the same launch holds it.

        Raises:
            UsageError: another run has it.
        """
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for _ in range(50):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _read_holder(descriptor)
                if token and holder.get("token") == token:
                    os.close(descriptor)
                    return False
                if holder:
                    os.close(descriptor)
                    raise UsageError(
                        f"{self.path} is in use: process {holder['pid']} on {holder['host']} is running in it; "
                        "wait for it, stop it, or choose another --run-dir"
                    ) from None
                time.sleep(0.1)  # it has just been taken, and the holder has not written its name yet
                continue
            self.lock_descriptor = descriptor
            self._write_holder({"pid": os.getpid(), "host": socket.gethostname(), "token": token, "prepared": False})
            return True
        os.close(descriptor)
        raise UsageError(f"{self.path} is in use by a process that did not say which; see {self.lock_file}")

    def unlock(self) -> None:
        """Give the lock up before this process ends. Does nothing if it is not held."""
        if self.lock_descriptor is not None:
            os.ftruncate(self.lock_descriptor, 0)
            os.close(self.lock_descriptor)
            self.lock_descriptor = None

    def wait_prepared(self, token: str, seconds: float = 120.0) -> None:
        """Wait until the process of this launch that holds the lock has prepared the directory."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.lock_file.exists():
                with open(self.lock_file) as file:
                    holder = _read_holder(file.fileno())
                    if holder.get("token") == token and holder["prepared"] and _is_locked(file.fileno()):
                        return
            time.sleep(0.1)
        raise RunError(
            f"{self.path} was not prepared by rank 0 within {seconds:.0f} s; is it on a file system all nodes see?"
        )

    def _write_holder(self, holder: dict[str, Any]) -> None:
        text = json.dumps(holder).encode()
        os.ftruncate(self.lock_descriptor, 0)
        os.pwrite(self.lock_descriptor, text, 0)

    # ---- preparation

    def prepare(self, recipe, *, fresh: bool = False, allow_change: bool = False, token: str | None = None) -> Prepared:
        """Create the directory, or make it ready to go on from its newest whole checkpoint. Takes the lock.

        With `token`, a process that finds the lock held by its own launch waits for that one to prepare.

        Raises:
            UsageError: in use, not a run directory, or of another recipe and neither `fresh` nor `allow_change`.
        """
        from omnitrain.recipe.loader import dump

        text = dump(recipe)
        self._check_place()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made: {error.strerror}; choose another --run-dir") from error
        if not self.lock(token):
            self.wait_prepared(token)
            return Prepared(resumed=True)
        notes = []
        try:
            if fresh and self.recipe_file.exists():
                notes.append(self._move_aside(token))
            resumed = self.recipe_file.exists()
            if resumed:
                notes += self._accept_change(recipe, text, allow_change)
            else:
                write_atomic(self.recipe_file, text)
            for folder in (self.samples, self.checkpoints, self.logs, self.plots):
                folder.mkdir(exist_ok=True)
            for leftover in (
                self.stop_file,
                self.exit_file,
                self.logs / "failures.json",
                *self.logs.glob("rank_*.error"),
            ):
                leftover.unlink(missing_ok=True)
            step = None
            if resumed:
                newest, skipped = latest_checkpoint(self.checkpoints)
                notes += skipped
                step = checkpoint_step(newest) if newest else None
                notes += discard_after(self, -1 if step is None else step)
                notes.append(
                    f"resuming after step {step}" if newest else "no checkpoint yet: starting from the beginning"
                )
        except BaseException:
            self.unlock()
            raise
        self._write_holder({"pid": os.getpid(), "host": socket.gethostname(), "token": token, "prepared": True})
        return Prepared(resumed, step, notes)

    def _check_place(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; a run needs a directory of its own (--run-dir)")
        if self.path.is_dir() and not self.recipe_file.exists():
            ours = (self.lock_file.name, f".{self.recipe_file.name}.tmp")  # all that a kill in `prepare` can leave
            others = [entry.name for entry in self.path.iterdir() if entry.name not in ours]
            if others:
                raise UsageError(
                    f"{self.path} is not empty and holds no recipe.toml, so it is not a run directory "
                    f"(it has {', '.join(sorted(others)[:3])}); choose another --run-dir"
                )

    def _move_aside(self, token: str | None) -> str:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        # The new directory is locked before it gets its name, so that nobody slips in between.
        new = RunDir(self.path.with_name(f".{self.path.name}.new-{os.getpid()}"))
        new.path.mkdir()
        new.lock(token)
        self.path.rename(aside)
        new.path.rename(self.path)
        os.close(self.lock_descriptor)
        self.lock_descriptor = new.lock_descriptor
        return f"the earlier run was moved to {aside}"

    def _accept_change(self, recipe, text: str, allow_change: bool) -> list[str]:
        from omnitrain.recipe.runtime import DRAWS, diff

        try:
            before = self.recipe()
        except RecipeError as error:
            raise UsageError(
                f"{self.recipe_file}, the recipe of the run to resume, cannot be read: {error}\n"
                "use --fresh to start again (the old run is moved aside, not deleted)"
            ) from error
        changes = diff(before, recipe)
        if (fixed := [change.path for change in changes if change.path in DRAWS]) and self.resumes():
            raise UsageError(
                f"{self.path}: {', '.join(fixed)} cannot change in a run that has begun, as its rows would repeat or be "
                "skipped; undo that, start again by --fresh, or choose another --run-dir"
            )
        refused = [change for change in changes if change.kind == "mathematics"]
        if refused and not allow_change and self._has_progress():
            lines = [f"  {change.path}: {_shown(change.old)} -> {_shown(change.new)}" for change in refused]
            raise UsageError(
                f"{self.path} holds a run of another recipe:\n" + "\n".join(lines) + "\n"
                "go on with the new values by --allow-change, start again by --fresh (the old run is moved aside), "
                "or choose another --run-dir"
            )
        if not changes:
            return []
        number = 1
        while (kept := self.logs / f"recipe-{number}.toml").exists():
            number += 1
        self.logs.mkdir(exist_ok=True)
        shutil.copyfile(self.recipe_file, kept)
        write_atomic(self.recipe_file, text)
        return [f"changed: {change.path} = {_shown(change.new)} (was {_shown(change.old)})" for change in changes]

    def _has_progress(self) -> bool:
        """Whether there is anything of the old recipe to protect: a run that failed before its first step has nothing."""
        has_metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_metrics or latest_checkpoint(self.checkpoints)[0] is not None


def _shown(value: Any) -> str:
    """A value of a recipe for a message: a path as its text, also in a list."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(str(value) if isinstance(value, Path) else value)


def _read_holder(descriptor: int) -> dict[str, Any]:
    try:
        return json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


# ---- checkpoints, as far as they can be judged without torch


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint folder's name, step_N."""
    return int(path.name.removeprefix("step_"))


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest, after checking that every file it lists is there in full.

    Raises:
        RunError: saying what is missing or damaged.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except FileNotFoundError:
        raise RunError(f"{path} has no {MANIFEST}: it was not written to the end") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path / MANIFEST} is damaged: {error!r}") from error
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            raise RunError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != size:
            raise RunError(f"{path} is damaged: {name} has {file.stat().st_size} bytes instead of {size}")
    return manifest


def whole_checkpoints(folder: Path) -> tuple[list[Path], list[str]]:
    """(whole checkpoints, oldest first; a line for each half-written or damaged one)."""
    whole, skipped = [], []
    candidates = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    for path in sorted(candidates, key=checkpoint_step):
        try:
            read_manifest(path)
            whole.append(path)
        except RunError as error:
            skipped.append(f"skipped a checkpoint: {error}")
    for path in sorted(folder.glob(".tmp_step_*")):
        skipped.append(f"skipped a checkpoint: {path} was not written to the end")
    return whole, skipped


def latest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """(newest whole checkpoint or None, a line for each that was skipped)."""
    whole, skipped = whole_checkpoints(folder)
    return (whole[-1] if whole else None), skipped


# ---- what a resumed run leaves behind


def discard_after(run: RunDir, step: int) -> list[str]:
    """Move metrics lines and samples of later steps to discarded/, so that a resumed run writes them once."""
    notes = []
    kept, dropped = [], []
    for line in run.metrics.read_text(errors="replace").splitlines(keepends=True) if run.metrics.exists() else []:
        (kept if _line_step(line) <= step else dropped).append(line)
    if dropped:
        run.discarded.mkdir(exist_ok=True)
        with open(run.discarded / run.metrics.name, "a") as file:
            file.writelines(line if line.endswith("\n") else line + "\n" for line in dropped)
            file.flush()
            os.fsync(file.fileno())
        write_atomic(run.metrics, "".join(kept))
        notes.append(f"moved {len(dropped)} metrics lines written after the checkpoint to {run.discarded.name}/")
    for folder in sorted(run.samples.glob("step_*")) if run.samples.exists() else []:
        number = folder.name.removeprefix("step_")
        if number.isdigit() and int(number) > step:
            (run.discarded / "samples").mkdir(parents=True, exist_ok=True)
            target, again = run.discarded / "samples" / folder.name, 2
            while target.exists():
                target, again = target.with_name(f"{folder.name}.{again}"), again + 1
            folder.rename(target)
            notes.append(f"moved samples/{folder.name} to {run.discarded.name}/")
    return notes


def _line_step(line: str) -> float:
    """The step of a metrics line; infinity for one that was cut short by a kill."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


# ---- stop and exit


def request_stop(run: RunDir, when: str) -> None:
    """Ask the run to save and end: "step" finishes the step, "update" ends at the next update edge."""
    write_atomic(run.stop_file, when)


def stop_requested(run: RunDir) -> str | None:
    """None, "step" or "update", as this process sees it now; ranks compare what they saw."""
    try:
        return run.stop_file.read_text().strip()
    except FileNotFoundError:
        return None


def write_exit(run: RunDir, code: int, message: str = "") -> None:
    """How the run ended; rank 0's word. The command's exit code comes from here."""
    write_atomic(run.exit_file, json.dumps({"code": code, "message": message}))


def read_exit(run: RunDir) -> tuple[int, str] | None:
    """(code, message), or None if rank 0 did not come to write it."""
    try:
        result = json.loads(run.exit_file.read_text())
    except FileNotFoundError:
        return None
    return result["code"], result["message"]
