"""Reading a published checkpoint by slices, and writing its names: what each rank needs, nothing more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from omnitrain.errors import ModelError
from omnitrain.recipe.sizes import hub_name

PREFIX = "thinker."
_MERGED_AT_ONCE = 16
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


def resolve(path: str) -> Path:
    """The checkpoint's directory: `path` itself, or a hub name that is already in the local cache.

    Raises ModelError if it is neither.
    """
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise ModelError(f"model.path = {path!r} is a file; it must be the checkpoint's directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        if not hub_name(path):
            raise ModelError(f"model.path = {path!r}: no such directory") from error
        raise ModelError(
            f"model.path = {path!r} is neither a directory nor a model in the local hub cache; "
            f"download it first (`hf download {path}`) or give its directory"
        ) from error


class Checkpoint:
    """A Qwen3-Omni checkpoint directory, read tensor by tensor or by rows of a tensor.

    Raises ModelError, naming the file and what is wrong: no config, another architecture, no weights,
    a missing or damaged shard, a missing or misshapen tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = resolve(str(path))
        self._open: dict[str, safe_open] = {}
        self.config = self._config()
        self._file_of = self._index()

    def _config(self):
        from transformers import Qwen3OmniMoeConfig

        file = self.path / "config.json"
        if not file.is_file():
            raise ModelError(f"{self.path}: no config.json; model.path must be a checkpoint directory")
        try:
            kind = json.loads(file.read_text()).get("model_type")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise ModelError(f"{file}: not a JSON object ({error}); copy the checkpoint again") from error
        if kind != "qwen3_omni_moe":
            raise ModelError(
                f'{file}: model_type is {kind!r}, but model.family = "qwen3_omni" needs "qwen3_omni_moe"; '
                "give a Qwen3-Omni checkpoint or change model.family"
            )
        return Qwen3OmniMoeConfig.from_pretrained(self.path)

    def _index(self) -> dict[str, str]:
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if index.is_file():
            try:
                file_of = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError) as error:
                raise ModelError(f"{index}: not a safetensors index ({error!r}); copy the checkpoint again") from error
            needed = {file for name, file in file_of.items() if name.startswith(PREFIX)}
            missing = sorted(file for file in needed if not (self.path / file).is_file())
            if missing:
                raise ModelError(
                    f"{self.path}: {len(missing)} of {len(needed)} weight files are missing: {_few(missing)}; "
                    "copy or download the checkpoint again"
                )
            return file_of
        if not single.is_file():
            raise ModelError(
                f"{self.path}: no weights (neither model.safetensors nor model.safetensors.index.json); "
                "copy or download the whole checkpoint"
            )
        return {name: single.name for name in self._file(single.name).keys()}

    def _file(self, name: str):
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, "pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{self.path / name}: damaged ({error}); copy or download it again") from error
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def files(self) -> dict[str, list[str]]:
        """Stored names by weight file, talker and code2wav included. Raises ModelError if one of the files is not there."""
        found: dict[str, list[str]] = {}
        for name, file in self._file_of.items():
            found.setdefault(file, []).append(name)
        missing = sorted(file for file in found if not (self.path / file).is_file())
        if missing:
            raise ModelError(f"{self.path}: {len(missing)} weight files are missing: {_few(missing)}; download it again")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the stored tensor `name`."""
        return tuple(self._slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor `name`, as it is."""
        self.shape(name)
        return self._file(self._file_of[name]).get_tensor(name)

    def _slice(self, name: str):
        try:
            return self._file(self._file_of[name]).get_slice(name)
        except (SafetensorError, KeyError) as error:
            raise ModelError(f"{self.path}: tensor {name} is missing; copy or download the checkpoint again") from error

    def require(self, shapes: dict[str, torch.Size]) -> None:
        """Check that every thinker parameter of `shapes` (by transformers' name) is there with that shape."""
        missing, wrong = [], []
        for name, shape in shapes.items():
            for stored, expected in _stored(name, shape, self):
                if stored not in self:
                    missing.append(stored)
                elif (found := self.shape(stored)) != tuple(expected):
                    wrong.append(f"{stored} is {found}, config.json says {tuple(expected)}")
        if missing:
            raise ModelError(f"{self.path}: {len(missing)} tensors are missing: {_few(missing)}; download it again")
        if wrong:
            raise ModelError(f"{self.path}: {len(wrong)} tensors have another shape: {_few(wrong)}")

    def rows(self, name: str, shape: torch.Size, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop (of dimension 0) of the thinker parameter `name`; fused experts are assembled."""
        if PREFIX + name in self:
            return self._slice(PREFIX + name)[start:stop]
        if start >= stop:
            return torch.empty(0, *shape[1:])
        prefix, kind = _FUSED.match(name).groups()
        read = lambda e, part: self._slice(f"{PREFIX}{prefix}.{e}.{part}.weight")[:]  # noqa: E731
        if kind == "down_proj":
            return torch.stack([read(e, "down_proj") for e in range(start, stop)])
        return torch.stack([torch.cat([read(e, "gate_proj"), read(e, "up_proj")]) for e in range(start, stop)])


def local_rows(checkpoint: Checkpoint, name: str, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's part of `parameter` (meta) read from the checkpoint, in its dtype, as tensor or DTensor."""
    shape = parameter.shape
    if not isinstance(parameter, DTensor):
        return checkpoint.rows(name, shape, 0, shape[0]).to(device=device, dtype=parameter.dtype)
    size, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    local = checkpoint.rows(name, shape, offset[0], offset[0] + size[0])
    return as_shard(local.to(device=device, dtype=parameter.dtype), parameter)


def as_shard(local: torch.Tensor, like: DTensor) -> DTensor:
    """Wrap this rank's rows as a DTensor laid out like `like`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_of(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`full` (the same on every rank) laid out like `parameter`."""
    if not isinstance(parameter, DTensor):
        return full
    size, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return as_shard(full[offset[0] : offset[0] + size[0]].clone(), parameter)


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The full tensor on every rank (a collective), cast before it is gathered."""
    tensor = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def exchanged(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Inside, each parameter has its partner's values; afterwards its own again, bit for bit.

    Copied in place: FSDP gathers from storage of its own, which another tensor in the parameter's place would not reach.
    """
    pairs = list(pairs)
    kept = [parameter.detach().clone() for parameter, _ in pairs]
    with torch.no_grad():
        for parameter, value in pairs:
            parameter.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for (parameter, _), value in zip(pairs, kept):
                parameter.copy_(value)


@dataclass
class Kept:
    """How much of the LoRA deltas survived the cast to the engine's dtype."""

    along: torch.Tensor | float = 0.0
    total: torch.Tensor | float = 0.0

    @property
    def share(self) -> float:
        """Sum of <cast(W + D) - W, D> over sum of <D, D>: 1 is all, 0 is none. 1 where there is no delta."""
        return float(self.along) / float(self.total) if float(self.total) > 0 else 1.0


def merge(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype, kept: Kept | None = None
) -> torch.Tensor:
    """W + scale B A, formed in float32 and cast once. W (out, in), A (r, in), B (out, r); of experts with E before each."""
    if weight.ndim == 3 and len(weight) > _MERGED_AT_ONCE:  # float32 copies of a layer's experts would be gigabytes
        parts = zip(*(tensor.split(_MERGED_AT_ONCE) for tensor in (weight, a, b)), strict=True)
        return torch.cat([merge(*part, scale, dtype, kept) for part in parts])
    base = weight.float()
    delta = scale * (b.float() @ a.float())
    merged = (base + delta).to(dtype)
    if kept is not None:
        kept.along = kept.along + ((merged.float() - base) * delta).sum(dtype=torch.float64)
        kept.total = kept.total + delta.square().sum(dtype=torch.float64)
    return merged


def published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A thinker tensor under its published name or names.

    Fused experts, gate_up_proj (E, 2I, H) and down_proj (E, H, I), become one gate_proj, up_proj and
    down_proj per expert; everything else only gets the prefix "thinker.".
    """
    for (stored, _), part in zip(_stored(name, tensor.shape), _parts(name, tensor), strict=True):
        yield stored, part


def published_pieces(
    name: str, shape: torch.Size, checkpoint: Checkpoint
) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """(stored name, place) of each piece of a parameter in this checkpoint.

    A place is (expert, half of its rows), half -1 for all of them; None where the parameter is stored whole.
    """
    stored = [piece for piece, _ in _stored(name, shape, checkpoint)]
    if stored == [PREFIX + name]:
        yield stored[0], None
        return
    halves = (0, 1) if name.endswith("gate_up_proj") else (-1,)
    yield from zip(stored, ((e, half) for e in range(shape[0]) for half in halves), strict=True)


def published_names(name: str, shape: torch.Size) -> list[str]:
    """The published names of one thinker parameter."""
    return [stored for stored, _ in _stored(name, shape)]


def _stored(name: str, shape: torch.Size, checkpoint: Checkpoint | None = None):
    """(published name, shape) of each piece of a parameter. A checkpoint that stores it fused is respected."""
    match = _FUSED.match(name)
    if match is None or (checkpoint is not None and PREFIX + name in checkpoint):
        yield PREFIX + name, shape
        return
    prefix, kind = match.groups()
    experts, rows, columns = shape
    for e in range(experts):
        if kind == "down_proj":
            yield f"{PREFIX}{prefix}.{e}.down_proj.weight", (rows, columns)
        else:
            yield f"{PREFIX}{prefix}.{e}.gate_proj.weight", (rows // 2, columns)
            yield f"{PREFIX}{prefix}.{e}.up_proj.weight", (rows // 2, columns)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    match = _FUSED.match(name)
    if match is None:
        yield tensor
    else:
        for expert in tensor:
            yield from expert.chunk(2, 0) if match[2] == "gate_up_proj" else (expert,)


def _few(items: list[str], most: int = 3) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
