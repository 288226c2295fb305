"""Trained weights as files that others load: a PEFT adapter, and a whole checkpoint in the published layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni import lora
from omnitrain.models.qwen3_omni.spec import EXPERTS, Lora
from omnitrain.models.qwen3_omni.weights import Checkpoint, merge, published_pieces

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5")

Read = Callable[[list[str]], dict[str, Tensor]]
"""Trained tensors, whole, by plain name."""


# ---- the adapter


def write_adapter(folder: Path, tensors: dict[str, Tensor], spec: Lora, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, for PeftModel.from_pretrained on the whole Qwen3-Omni.

    tensors: the factors by plain name. base: the checkpoint they belong to.
    """
    from peft import LoraConfig

    settings = lora.settings(spec)
    # By full name: the talker's experts end in the same words, and peft excludes modules, not parameters.
    factors = [name for name in tensors if ".mlp.experts." in name]
    settings["target_parameters"] = sorted({"thinker." + name.split(".lora_")[0] for name in factors}) or None
    LoraConfig(**settings, base_model_name_or_path=base, inference_mode=True).save_pretrained(folder)
    targets = spec.module_names()
    named = {lora.peft_name(name, targets): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter directory's contents."""

    rank: int
    alpha: float
    targets: list[str]
    tensors: dict[str, Tensor]
    """Factors by plain name."""


def read_adapter(folder: Path) -> StoredAdapter:
    """Read a PEFT LoRA adapter of the Thinker's text decoder, ours or another's. Raises ModelError if it is not one."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder} is no readable PEFT adapter ({error}); export or copy it again") from error
    odd = [key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias") if config.get(key)]
    if config.get("peft_type") != "LORA" or odd:
        raise ModelError(f"{folder} is no plain LoRA adapter ({', '.join(odd) or config.get('peft_type')}); only those are taken")
    fused = {name.rsplit(".", 1)[-1] for name in config.get("target_parameters") or ()}
    try:
        plain = {
            lora.plain_name("base_model.model." + name.removeprefix("base_model.model.").removeprefix("thinker."), [*fused]): t
            for name, t in tensors.items()
        }
    except IndexError:
        raise ModelError(f"{folder}: its tensors and target_parameters in {ADAPTER_CONFIG} do not match") from None
    found = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in plain}
    return StoredAdapter(rank, alpha, sorted(found), plain)


def check_adapter(found: StoredAdapter, spec: Lora, where: str) -> None:
    """Raise ModelError, with both values, unless the adapter has the rank, alpha and targets of `spec`."""
    wanted = sorted(spec.module_names())
    for field, theirs, ours in (
        ("rank", found.rank, spec.rank), ("alpha", found.alpha, spec.alpha), ("targets", found.targets, wanted),
    ):  # fmt: skip
        if theirs != ours:
            raise ModelError(
                f"model.adapter = {where} has {field} {theirs}, and model.lora.{field} is {ours}; "
                f"set model.lora.{field} = {json.dumps(theirs)}, or start from another adapter"
            )


# ---- the whole checkpoint


def write_merged(
    folder: Path, base: Checkpoint, shapes: dict[str, torch.Size], read: Read, spec: Lora | None,
    say: Callable[[str], None] = lambda text: None,
) -> None:  # fmt: skip
    """Write the base checkpoint with the trained weights in it: the same files, names, dtypes and index.

    Every other tensor (towers, talker, code2wav) and every other file is the base's, unchanged.

    shapes: of the trained tensors by plain name, LoRA factors or whole parameters. read: gives them, whole.
    """
    changed = _changed(base, shapes, spec)
    cache: dict[str, dict[str, Tensor]] = {}
    for file, names in base.files().items():
        say(f"writing {file}")
        if not changed.keys() & set(names):
            shutil.copyfile(base.path / file, folder / file)
            continue
        tensors = {}
        # Pieces of one parameter together: it is read once.
        for name in sorted(names, key=lambda name: changed[name].key if name in changed else ""):
            tensor = base.tensor(name)
            tensors[name] = changed[name].value(tensor, read, cache) if name in changed else tensor
        save_file(tensors, folder / file, metadata={"format": "pt"})
    for path in base.path.iterdir():
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)


@dataclass(frozen=True)
class _Piece:
    """One stored tensor that training changes."""

    names: tuple[str, ...]
    """The trained parameter, or its two factors."""
    place: tuple[int, int] | None
    """(expert, half of its rows) of a fused parameter, half -1 for all; None for the whole parameter."""
    adapter: lora.Adapter | None

    @property
    def key(self) -> str:
        return self.names[0]

    def value(self, stored: Tensor, read: Read, cache: dict[str, dict[str, Tensor]]) -> Tensor:
        """The trained tensor in the stored one's dtype."""
        if self.key not in cache:
            cache.clear()
            cache[self.key] = read(list(self.names))
        tensors = [cache[self.key][name] for name in self.names]
        if self.adapter is None:
            return self._part(tensors[0]).to(stored.dtype).contiguous()
        a, b = self.adapter.factors(*tensors)
        return merge(stored, a if self.place is None else a[self.place[0]], self._part(b), self.adapter.scale, stored.dtype)

    def _part(self, tensor: Tensor) -> Tensor:
        if self.place is None:
            return tensor
        expert, half = self.place
        return tensor[expert] if half < 0 else tensor[expert].chunk(2, 0)[half]


def _changed(base: Checkpoint, shapes: dict[str, torch.Size], spec: Lora | None) -> dict[str, _Piece]:
    """What becomes of which stored tensor. Raises ModelError if the base lacks one, or has it in another shape."""
    sources: dict[str, tuple[tuple[str, ...], lora.Adapter | None]] = {}
    whole: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        if spec is None:
            sources[name], whole[name] = ((name,), None), shape
        elif name.endswith(".lora_A.weight"):
            parameter, other = name.removesuffix(".lora_A.weight"), name.replace(".lora_A.", ".lora_B.")
            ends = torch.Size((shapes[other][0], shape[1]))
            experts = shape[0] // spec.rank if parameter.endswith(tuple(f".experts.{target}" for target in EXPERTS)) else 0
            parameter, ends = (parameter, (experts, *ends)) if experts else (f"{parameter}.weight", ends)
            sources[parameter] = ((name, other), lora.Adapter(name, other, spec.alpha / spec.rank, experts))
            whole[parameter] = torch.Size(ends)
    base.require(whole)
    return {
        stored: _Piece(names, place, adapter)
        for parameter, (names, adapter) in sources.items()
        for stored, place in published_pieces(parameter, whole[parameter], base)
    }
