"""The same recipe, small enough for minutes on a CPU: what `omnitrain rehearse` runs. Every substitution is said."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omnitrain.recipe.loader import resolved, validated
from omnitrain.recipe.schema import Recipe

STEPS = 2
PROMPTS = 4
GROUP = 4
NEW_TOKENS = 16
DRAWS = 2
FRAMES = 4
PIXELS = 128 * 128
MODEL = "model"
DATA = "data"
VARIED = "omnitrain.rewards.controls:varied"

# What the rows of a published data set hold, by its name in the path of a file. A file of another name gets all kinds.
_DATA_SETS = {
    "gsm8k": ("text",),
    "mmk12": ("image",),
    "avqa": ("image+audio",),
    "nextqa": ("video",),
    "omni_preference": ("image", "audio", "video"),
}
_ALL = ("text", "image", "audio", "image+audio", "video")
# A label that the reward accepts; the first reward that scores a row and is named here says which.
_LABELS = {"choice": "<answer>A</answer>", "mmk12": "A", "math": "4"}


@dataclass(frozen=True)
class SyntheticRows:
    """What rows must hold so that the recipe's rewards, validation and batches can work with them."""

    modalities: tuple[str, ...]
    """As Row.modality says them."""
    labels: dict[str, str]
    """The `answer` of the rows of each source."""
    pairs: bool
    """Rows with `chosen` and `rejected`."""


def rehearsal(recipe: Recipe, workdir: Path, loopback: str = "http://127.0.0.1") -> tuple[Recipe, list[str]]:
    """The recipe to rehearse with, and one line for each substituted field.

    The model becomes `workdir/model` (the caller writes the family's tiny checkpoint there). The rows stay the
    recipe's own where their file is here; a missing file becomes one in `workdir/data` (the caller writes
    `synthetic_rows` there). `loopback` is the address of a server that answers in the place of reward endpoints.
    Paths are absolute.
    """
    changes = _Changes(resolved(recipe).plain())
    put = changes.put
    put("name", f"{recipe.name}-rehearsal")
    put("model.path", str((workdir / MODEL).absolute()), "a tiny random model of the family")
    put("model.dtype", "float32")
    put("model.attention", "sdpa", "runs on a CPU")
    put("model.init_from", None, "another size")
    put("model.adapter", None, "another size")
    _data(recipe, put, workdir)
    _train(recipe, put)
    if recipe.rollout is not None:
        _rollout(recipe, put)
        _rewards(recipe, put, loopback)
    if recipe.data.validation is not None:
        put("validate.every", 1)
        put("validate.max_rows", min(PROMPTS, recipe.validate_.max_rows or PROMPTS))
    put("checkpoint.every", 1)
    if recipe.algorithm.online:
        put("samples.every", 1)
    if recipe.profile is not None:
        put("profile.steps", sorted({min(STEPS, step) for step in recipe.profile.steps}))
    put("trackers.wandb", None, "a rehearsal stays off the network")
    return validated(changes.data), changes.said


def synthetic_rows(recipe: Recipe) -> SyntheticRows:
    """The rows to write for a recipe's missing files."""
    names = ["/".join(file.path.parts).replace("-", "_") for file in recipe.data.train_files]
    known = [name for name in _DATA_SETS if any(name in path for path in names)]
    modalities = tuple(recipe.data.modality_weights or {}) or tuple(
        dict.fromkeys(modality for name in known for modality in _DATA_SETS[name])
    )
    sources = {source for reward in recipe.rewards for source in reward.sources or ()}
    best = recipe.checkpoint.keep_best
    if best is not None and best.metric.startswith("val/") and recipe.algorithm.online:
        sources.add(best.metric.split("/", 1)[1].rpartition("/")[0])
    sources = sorted(sources) or known[:1] or ["synthetic"]
    return SyntheticRows(
        modalities or _ALL, {source: _label(recipe, source) for source in sources}, recipe.algorithm.kind == "dpo"
    )


def endpoints(recipe: Recipe) -> tuple[bool, list[str]]:
    """(whether a reward asks a server, the models that such servers must serve)."""
    rewards = [reward for reward in recipe.rewards if hasattr(reward, "url")]
    return bool(rewards), [reward.model for reward in rewards if hasattr(reward, "model")]


class _Changes:
    """The recipe's plain data and what was changed in it."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.said = data, []

    def put(self, path: str, value: Any, why: str = "") -> None:
        """Set a field (`rewards[0].url` too), take it out with None, or append to a list; an equal value is no change."""
        *tables, name = path.replace("[", ".").replace("]", "").split(".")
        table: Any = self.data
        for part in tables:
            table = table[int(part)] if part.isdigit() else table.setdefault(part, {})
        if isinstance(table, list):
            old = None
            table.append(value)
        elif (old := table.get(name)) == value:
            return
        elif value is None:
            del table[name]
        else:
            table[name] = value
        self.said.append(f"{path}: {_text(old)} -> {_text(value)}" + (f" ({why})" if why else ""))


def _data(recipe: Recipe, put, workdir: Path) -> None:
    data = recipe.data
    taken: set[str] = set()
    for field, paths in (("train", [file.path for file in data.train_files]), ("validation", data.validation_files)):
        kept = [path.absolute() if path.exists() else _free(workdir / DATA, path, taken) for path in paths]
        if [path.absolute() for path in paths] != kept:
            value = [str(path) for path in kept] if isinstance(getattr(data, field), list) else str(kept[0])
            put(f"data.{field}", value, "synthetic rows, for what is not here")
    put("data.image.min_pixels", min(data.image.min_pixels, PIXELS))
    put("data.image.max_pixels", min(data.image.max_pixels, PIXELS))
    put("data.video.min_pixels", min(data.video.min_pixels, PIXELS // 4))
    put("data.video.max_pixels", min(data.video.max_pixels, PIXELS))
    put("data.video.min_frames", min(data.video.min_frames, FRAMES))
    put("data.video.max_frames", min(data.video.max_frames, FRAMES))


def _free(folder: Path, path: Path, taken: set[str]) -> Path:
    """A file in `folder` by the name of `path`, or the next one that no other has."""
    name, count = path.name, 2
    while name in taken:
        name, count = f"{path.stem}_{count}{path.suffix}", count + 1
    taken.add(name)
    return (folder / name).absolute()


def _train(recipe: Recipe, put) -> None:
    train = recipe.train
    prompts = min(PROMPTS, train.prompts_per_step)
    put("train.max_steps", STEPS)
    put("train.epochs", None)
    put("train.prompts_per_step", prompts)
    if train.prompts_per_update is not None:
        # Several updates a step stay several: they take another path through the ratio.
        several = train.prompts_per_update < train.prompts_per_step
        put("train.prompts_per_update", prompts // 2 if several and prompts % 2 == 0 else prompts)
    put("train.warmup_updates", min(1, train.warmup_updates))


def _rollout(recipe: Recipe, put) -> None:
    rollout, algorithm = recipe.rollout, recipe.algorithm
    tokens = min(NEW_TOKENS, rollout.max_new_tokens)
    put("rollout.group_size", min(GROUP, rollout.group_size))
    put("rollout.max_new_tokens", tokens)
    if rollout.engine == "vllm_omni":
        put("rollout.tensor_parallel", 1)
    if recipe.validate_.max_new_tokens is not None:
        put("validate.max_new_tokens", min(NEW_TOKENS, recipe.validate_.max_new_tokens))
    if algorithm.kind == "dapo":
        if algorithm.dynamic_sampling:
            put("algorithm.max_generation_batches", min(DRAWS, algorithm.max_generation_batches))
        put("algorithm.overlong_buffer", min(tokens, algorithm.overlong_buffer))


def _rewards(recipe: Recipe, put, loopback: str) -> None:
    tokens = min(NEW_TOKENS, recipe.rollout.max_new_tokens)
    for index, reward in enumerate(recipe.rewards):
        at = f"rewards[{index}]"
        if hasattr(reward, "url"):
            why = "a server of this rehearsal, which answers by chance"
            put(f"{at}.url", loopback + urlsplit(reward.url).path.rstrip("/"), why)
            put(f"{at}.api_key_env", None, "the server of this rehearsal asks for none")
        elif reward.kind == "length":
            put(f"{at}.limit", None if reward.limit is None else min(tokens, reward.limit))
            put(f"{at}.buffer", min(tokens, reward.buffer))
    put(
        f"rewards[{len(recipe.rewards)}]",
        {"kind": "python", "function": VARIED},
        "a random model is never right: without a reward that differs it would learn from nothing",
    )


def _label(recipe: Recipe, source: str) -> str:
    kinds = [reward.kind for reward in recipe.rewards if reward.sources is None or source in reward.sources]
    return next((label for kind, label in _LABELS.items() if kind in kinds), _LABELS["choice"])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(map(str, value.values()))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not set" if value is None else str(value)
