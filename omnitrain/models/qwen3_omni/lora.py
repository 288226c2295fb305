"""LoRA on the Thinker's text decoder, through peft: where it binds, how it starts, what it is called."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni.spec import Lora
from omnitrain.models.qwen3_omni.weights import shard_of

# peft matches a target list by the end of a name, which would also hit the audio tower's projections. A regex
# target is no way out: for this family peft 0.21 rewrites it, and it binds 14 modules of the tiny model, not 8.
_NOT_TEXT = r"(.*\.)?(visual|audio_tower|talker|code2wav)\..*"


@dataclass(frozen=True)
class Adapter:
    """One module's adapter: its parameters' names and the factor on B A."""

    a: str
    b: str
    scale: float


def wrap(thinker: nn.Module, spec: Lora) -> nn.Module:
    """Wrap a thinker on meta with LoRA on its text decoder. Raises ModelError if a target matches nothing."""
    from peft import LoraConfig, get_peft_model

    targets = spec.module_names()
    modules = [n.rsplit(".", 1)[-1] for n, m in thinker.model.layers.named_modules() if isinstance(m, nn.Linear)]
    unknown = [target for target in targets if target not in modules]
    if unknown or not targets:
        raise ModelError(
            f"model.lora.targets: {', '.join(unknown) or 'an empty list'} matches no linear module "
            f"of the text decoder; there are {', '.join(sorted(set(modules)))}"
        )
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        exclude_modules=_NOT_TEXT,
    )
    wrapped = get_peft_model(thinker, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    expected = sum(leaf in targets for leaf in modules)
    bound = len(adapters(wrapped))
    if bound != expected:
        raise ModelError(f"model.lora bound {bound} modules where {expected} are meant; check the version of peft")
    return wrapped


def initial(named: dict[str, Tensor], seed: int, device: torch.device) -> dict[str, Tensor]:
    """Starting values for LoRA parameters on meta: A kaiming-uniform as in peft, B zero; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name in sorted(named):
        full = torch.zeros(named[name].shape, dtype=torch.float32)
        if ".lora_A." in name:
            bound = math.sqrt(1 / full.shape[1])  # kaiming_uniform(a=sqrt(5)) over the inputs
            full.uniform_(-bound, bound, generator=generator)
        state[name] = shard_of(full.to(device), named[name])
    return state


def adapters(module: nn.Module) -> dict[str, Adapter]:
    """Adapters by the plain name of the module they sit on, in order; empty without LoRA."""
    found = {}
    for name, child in module.named_modules():
        if isinstance(getattr(child, "scaling", None), dict) and "default" in getattr(child, "lora_A", ()):
            plain = plain_name(name)
            found[plain] = Adapter(f"{plain}.lora_A.weight", f"{plain}.lora_B.weight", child.scaling["default"])
    return found


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """A name without what peft adds: "base_model.model.", ".base_layer" and ".default"."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", "")
