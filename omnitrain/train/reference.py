"""`algorithm.reference = "precomputed"`: the reference's log-probs of every response, computed once before step 1.

They lie in the run directory as reference.json: a digest of what they were computed from, and for the training and the
validation rows the summed log-probs of the chosen and the rejected response by row id. Rows that do not fit have none.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnitrain.data.sample import Sample
from omnitrain.errors import RunError
from omnitrain.models.qwen3_omni.weights import Checkpoint
from omnitrain.recipe.schema import Recipe
from omnitrain.rundir import RunDir, latest_checkpoint, write_atomic
from omnitrain.train.context import Context
from omnitrain.train.prompts import PromptSource

if TYPE_CHECKING:
    from omnitrain.train.preference import PreferenceLoop

Table = dict[str, list[float]]
"""Summed log-probs of the chosen and the rejected response, by row id."""

_CHUNK = 64
"""Rows between two looks at whether the user wants to stop, per rank."""
_PROBE = 1 << 20
"""Bytes read at the beginning and at the end of a weight file to know it again."""
_NAMES = {
    "train": "the training rows",
    "validation": "the validation rows",
    "model": "the model",
    "start": "the starting weights",
    "prompts": "the recipe's ways of making prompts",
}


class ReferenceSums:
    """The tables of a run, by source of rows."""

    def __init__(self, tables: list[tuple[PromptSource, Table]], path: Path) -> None:
        self._tables, self._path = tables, path

    def fill(self, samples: list[Sample], source: PromptSource) -> None:
        """Write `reference_sum` into samples of `source`. RunError for a row that was left out of the computation."""
        table = next(table for known, table in self._tables if known is source)
        for sample in samples:
            row = source.rows.ids[sample.row]
            if row not in table:
                raise RunError(f"{self._path} has no log-probs of row {row!r}; a limit was raised: start a new run")
            sample.reference_sum = table[row][sample.child]


def load_reference(loop: PreferenceLoop) -> ReferenceSums:
    """The run's reference log-probs: read where they are, else computed and written. Collective.

    Raises:
        RunError: the file belongs to other rows or another model, is damaged, or is gone from a run that has trained.
        Interrupted: the user asked to stop meanwhile.
    """
    context, path = loop.context, loop.context.run.reference
    ranks, resumed = context.ranks, loop.state.resumed
    digest = ranks.broadcast(_digest(context, resumed) if ranks.main else None)
    found = ranks.broadcast(_read(path, digest, resumed) if ranks.main else None)
    if isinstance(found, str):
        raise RunError(found)
    sources = {"train": loop.source} | ({"validation": loop.validation} if loop.validation else {})
    if found is None:
        found = {name: _compute(loop, name, source) for name, source in sources.items()}
        if ranks.main:
            write_atomic(path, json.dumps({"digest": digest} | found) + "\n")
    return ReferenceSums([(source, found[name]) for name, source in sources.items()], path)


@torch.no_grad()
def _compute(loop: PreferenceLoop, name: str, source: PromptSource) -> Table:
    context, ranks, policy = loop.context, loop.ranks, loop.policy
    total, step = len(source.rows), _CHUNK * loop.ranks.world
    table: Table = {}
    policy.module.eval()
    context.console.say(f"log-probs of {total} pairs of {_NAMES[name].removeprefix('the ')} under the reference")
    context.console.begin("reference")
    for start in range(0, total, step):
        context.check_start(1)
        rows = source.fitting(list(range(start, min(start + step, total))))
        mine: dict[tuple[int, int], float] = {}
        for batch in loop._passes(loop.samples(source, rows)):
            with loop.reference_policy():
                logp, _ = policy.logprobs(batch.inputs(source.encode))
            if not batch.filler:
                parts = logp.double().split([len(sample.tokens) for sample in batch.samples])
                mine |= {(s.row, s.child): part.sum().item() for s, part in zip(batch.samples, parts)}
        sums = {key: value for share in ranks.gather(mine) for key, value in share.items()}
        for row in rows:
            pair = [sums[row, 0], sums[row, 1]]
            if not all(map(math.isfinite, pair)):
                raise RunError(f"row {source.rows.ids[row]!r}: its log-probs under the reference are {pair}")
            table[source.rows.ids[row]] = pair
        context.console.beat(f"{min(start + step, total)} of {total} rows")
    return table


def _read(path: Path, digest: dict[str, Any], resumed: bool) -> dict[str, Table] | str | None:
    """The tables, None where they are to be computed, or what is wrong with the file."""
    fix = "start a new run (--fresh)" if resumed else "delete it, and it is computed again"
    if not path.exists():
        # The trained weights are loaded already: a full-parameter run cannot compute its reference any more.
        return f"{path} is gone, and this run has trained against it; put it back or {fix}" if resumed else None
    try:
        found = json.loads(path.read_text())
        known = found.pop("digest")
        whole = all(isinstance(found[name], dict) for name in ("train", "validation") if digest[name])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{path} is damaged ({error}); {fix}"
    changed = [name for name in digest if known.get(name) != digest[name] and not (resumed and name == "start")]
    if changed:
        return f"{path} was computed from something else: {_NAMES[changed[0]]} changed since; undo that, or {fix}"
    return found if whole else f"{path} is damaged; {fix}"


def _digest(context: Context, resumed: bool) -> dict[str, str | None]:
    """What the log-probs follow from, each part as a hash; of the starting weights only at the start, as the run that
    they came from may move on."""
    recipe, rows = context.recipe, context.validation_rows
    return {
        "train": context.train_rows.digest(),
        "validation": rows.digest() if rows else None,
        "model": fingerprint(Checkpoint(recipe.model.path).path) + f" {recipe.model.dtype}",
        "start": None if resumed else _start(recipe, context.run),
        "prompts": _prompts(recipe),
    }


def _start(recipe: Recipe, run: RunDir) -> str | None:
    """Of the weights that the reference has beside the model's own: a starting adapter, or full weights."""
    model = recipe.model
    if model.adapter is not None:
        return fingerprint(run.starting_adapter, (".safetensors",))
    if model.init_from is None or model.lora is not None:
        return None
    given = Path(model.init_from)
    newest = latest_checkpoint(given / "checkpoints")[0] if (given / "checkpoints").is_dir() else None
    return fingerprint(newest or given, (".distcp",))


def _prompts(recipe: Recipe) -> str:
    data = recipe.data
    settings = [data.system, data.image.model_dump(), data.video.model_dump(), data.use_audio_in_video]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def fingerprint(folder: Path, suffixes: tuple[str, ...] = ("",)) -> str:
    """SHA-256 of a folder's file names, sizes, first and last MiB each: weights of 60 GB are not read."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(suffixes)):
        size = path.stat().st_size
        whole.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            whole.update(file.read(_PROBE))
            file.seek(max(0, size - _PROBE))
            whole.update(file.read(_PROBE))
    return whole.hexdigest()
