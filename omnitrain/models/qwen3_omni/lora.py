"""LoRA on the Thinker's text decoder, through peft: where it binds, how it starts, what it is called.

Plain names are transformers' name of the adapted parameter, then the factor's: "...self_attn.q_proj.lora_A.weight", and of
fused experts "...mlp.experts.gate_up_proj.lora_A.weight". peft names the latter by how deep its wrappers are nested.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni import experts
from omnitrain.models.qwen3_omni.spec import EXPERTS, Lora
from omnitrain.models.qwen3_omni.weights import shard_of

# peft matches a target list by the end of a name, which would also hit the audio tower's projections. A regex
# target is no way out: for this family peft 0.21 rewrites it, and it binds 14 modules of the tiny model, not 8.
NOT_TEXT = r"(.*\.)?(visual|audio_tower|talker|code2wav)\..*"
_NESTED = re.compile(r"(.*\.mlp\.experts)((?:\.base_layer)*)(\.lora_[AB]\..*)")


@dataclass(frozen=True)
class Adapter:
    """One parameter's adapter: its factors' names and the factor on B A."""

    a: str
    b: str
    scale: float
    experts: int = 0
    """Number of fused experts; 0 for a projection."""

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A (r, in) and B (out, r), whose product times scale is the change; of experts (E, r, in) and (E, out, r)."""
        return experts.factors(a, b, self.experts) if self.experts else (a, b)


def settings(spec: Lora) -> dict[str, Any]:
    """peft's LoraConfig fields for `spec`, as they stand for the thinker alone."""
    targets = spec.module_names()
    return {
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [target for target in targets if target not in EXPERTS],
        "target_parameters": [f"mlp.experts.{target}" for target in EXPERTS if target in targets],
        "exclude_modules": NOT_TEXT,
    }


def wrap(thinker: nn.Module, spec: Lora) -> nn.Module:
    """Wrap a thinker on meta with LoRA on its text decoder. Raises ModelError if a target matches nothing."""
    from peft import LoraConfig, get_peft_model

    targets, layers = spec.module_names(), thinker.model.layers
    here = [n.rsplit(".", 1)[-1] for n, m in layers.named_modules() if isinstance(m, nn.Linear)]
    here += [n.rsplit(".", 1)[-1] for n, _ in layers.named_parameters() if ".mlp.experts." in n and n.endswith(EXPERTS)]
    unknown = [target for target in targets if target not in here]
    if unknown or not targets:
        raise ModelError(
            f"model.lora.targets: {', '.join(unknown) or 'an empty list'} matches no linear module "
            f"of the text decoder and no fused experts; there are {', '.join(sorted(set(here)))}"
        )
    config = LoraConfig(**settings(spec))
    wrapped = get_peft_model(thinker, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    experts.attach(wrapped)
    expected = sum(leaf in targets for leaf in here)
    bound = adapters(wrapped)
    named = {plain_name(name, targets) for name, _ in wrapped.named_parameters() if is_adapter(name)}
    if len(bound) != expected or named != {name for adapter in bound.values() for name in (adapter.a, adapter.b)}:
        raise ModelError(f"model.lora bound {len(bound)} modules where {expected} are meant; check the version of peft")
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
    """Adapters by the plain name of the parameter that they change, in order; empty without LoRA."""
    found = {}
    for name, child in module.named_modules():
        if not (isinstance(getattr(child, "scaling", None), dict) and "default" in getattr(child, "lora_A", ())):
            continue
        plain, count, weight = plain_name(name), 0, ".weight"
        if experts.is_wrapper(child):
            plain, count, weight = f"{plain}.{child.parameter_name}", child.num_experts, ""
        factors = (f"{plain}.{factor}.weight" for factor in ("lora_A", "lora_B"))
        found[plain + weight] = Adapter(*factors, child.scaling["default"], count)
    return found


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str, targets: list[str] | tuple[str, ...] = ()) -> str:
    """A name without what peft adds: "base_model.model.", ".base_layer" and ".default".

    targets: the adapter's, which an experts' factor needs: the first of EXPERTS among them is wrapped innermost.
    """
    if nested := _NESTED.match(name):
        wrapped = [target for target in EXPERTS if target in targets]
        module, depth, factor = nested.groups()
        name = f"{module}.{wrapped[-1 - depth.count('.base_layer')]}{factor}"
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", "")


def peft_name(plain: str, targets: list[str]) -> str:
    """The name of a factor in an adapter's file, for the whole Qwen3-Omni. `plain_name` without ".default" undoes it."""
    wrapped = [target for target in EXPERTS if target in targets]
    for depth, target in enumerate(reversed(wrapped)):
        plain = plain.replace(f".mlp.experts.{target}.lora_", f".mlp.experts{'.base_layer' * depth}.lora_")
    return f"base_model.model.thinker.{plain}"
