"""Weights into a running vLLM engine, by checkpoint name, with an account of what it took; quirks included."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Iterable

from omnitrain.errors import RunError
from omnitrain.rollout.vllm_compat import model, reset_caches

if TYPE_CHECKING:
    import torch

_GROUP_BYTES = 256 << 20
_WATCHED_OF_AN_EXPERT = 4096
_EXPERT = re.compile(r"(.*\.experts\.)(\d+\.)?[a-z_]+(_proj)?(\.weight)?$")


def reload(llm: Any, named: Iterable[tuple[str, "torch.Tensor"]], known: set[str]) -> "Reload":
    """Stream weights into the engine by checkpoint name and report what it took.

    `named` is drained in any case: it is collective. `known` remembers names that were taken before; the
    others are offered one at a time (a layer's experts together), since vLLM drops or refuses an unknown
    name without saying which. A module that got only some of its parts (q without k and v) keeps its old
    weights, and those parts count as ignored.
    """
    import torch

    net = model(llm)
    original = net.load_weights
    result = Reload()
    iterator = iter(named)

    def load_weights(weights):
        # An error in between would leave the model without its parameters: finish the reload, raise afterwards.
        try:
            result.run(net, original, weights, known)
        except Exception as error:
            result.error = error
        return result.loaded

    # Set on the instance, not the class; the plugin's own method would first collect the whole stream in a list.
    net.load_weights = load_weights
    try:
        with torch.no_grad():
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator, "is_checkpoint_format": True})
            if result.error is not None:
                raise result.error
            if any(".experts." in name for name in result.taken):
                _repack_cpu_experts(net)
    finally:
        del net.load_weights
        for _ in iterator:
            pass
    reset_caches(llm)
    return result


class Reload:
    """The account of one reload: names taken and ignored, engine parameters loaded, bytes."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.ignored: set[str] = set()
        self.loaded: set[str] = set()
        self.bytes = 0
        self.error: Exception | None = None

    def run(self, net, original, weights, known: set[str]) -> None:
        """Feed `weights` to the model's loader in groups that bound the memory held at once."""
        group, group_key, size = [], None, 0
        for name, tensor in weights:
            key = "" if name in known else _probe_key(name)
            if group and (key != group_key or size > _GROUP_BYTES):
                self._offer(original, group)
                group, size = [], 0
            group.append((name, tensor))
            group_key, size = key, size + tensor.numel() * tensor.element_size()
        if group:
            self._offer(original, group)
        for name in _drop_incomplete(net, self.taken):
            self.taken.discard(name)
            self.ignored.add(name)
        known |= self.taken
        known -= self.ignored

    def _offer(self, original, group) -> None:
        names = {name for name, _ in group}
        try:
            loaded = original(iter(group))
        except (ValueError, KeyError, AttributeError):  # what the loaders raise for a name they do not know
            loaded = set()
        if loaded:
            self.taken |= names
            self.loaded |= {_reported(name) for name in loaded}
            self.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in group)
        else:
            self.ignored |= names


def parameter_names(llm: Any) -> set[str]:
    """The engine's parameters, spelled as its loader reports them."""
    return {_reported(name) for name, _ in model(llm).named_parameters()}


def _reported(name: str) -> str:
    # The loader of 0.30 reports experts without the module that holds them.
    return name.replace(".experts.routed_experts.", ".experts.")


def _probe_key(name: str) -> str:
    match = _EXPERT.match(name)
    return match[1] if match else name


def _drop_incomplete(net, names: set[str]) -> set[str]:
    """Modules of which only a part was streamed: forget that part, so that their old weights stay.

    vLLM would fill the rest of a fused module with uninitialised memory. Returns the streamed names concerned.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    dropped = set()
    for path, layer in net.named_modules():
        info = get_layerwise_info(layer)
        total = info.load_numel_total or 0
        if not info.can_load() or not 0 < info.load_numel < total:
            continue
        if isinstance(layer, VocabParallelEmbedding):  # padded rows are never loaded
            continue
        info.loaded_weights.clear()
        info.load_numel = 0
        dropped |= {name for name in names if module_path(net, name) == path}
    return dropped


def module_path(net: "torch.nn.Module", name: str) -> str | None:
    """Path of the engine's module that holds the streamed parameter `name`, or None."""
    thinker = getattr(net, "thinker", net)
    prefix = "thinker." if thinker is not net else ""
    mapped = thinker.hf_to_vllm_mapper.apply_list([name])
    if not mapped:
        return None
    path = prefix + mapped[0].rpartition(".")[0]
    modules = dict(net.named_modules())
    if ".experts." in path + ".":
        path = path.split(".experts")[0] + ".experts"
        return f"{path}.routed_experts" if f"{path}.routed_experts" in modules else path
    for fused, parts in thinker.packed_modules_mapping.items():
        for part in parts:
            if path.endswith("." + part):
                candidate = path[: -len(part)] + fused
                if candidate in modules:
                    return candidate
    return path if path in modules else None


def _repack_cpu_experts(net) -> int:
    """vLLM 0.30 packs the experts for its CPU kernel on the first load only; later loads would leave it stale."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    count = 0
    for layer in net.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and hasattr(layer, "w13_weight"):
            experts.process_weights_after_loading(layer)
            count += 1
    return count


def watch(llm: Any, name: str, columns: int = 16) -> "torch.Tensor":
    """What the engine's kernel holds of a linear weight: (columns, out) float32, its first input columns.

    Read by applying the layer to unit vectors, because a CPU kernel keeps its packed copy to itself. Of fused experts:
    (experts, n) float32, the same values of each expert's tensor as it lies in memory.
    """
    import torch
    from vllm.config import set_current_vllm_config

    net = model(llm)
    path = module_path(net, name)
    layer = net.get_submodule(path) if path else None
    if hasattr(layer, "w13_weight"):
        weight = layer.w2_weight if name.endswith("down_proj.weight") else layer.w13_weight
        return weight.detach().flatten(1)[:, :_WATCHED_OF_AN_EXPERT].float().clone().cpu()
    if layer is None or not hasattr(layer, "quant_method") or not hasattr(layer, "input_size"):
        raise RunError(f"vllm_omni: {name} is no linear layer of the engine")
    size = getattr(layer, "input_size_per_partition", layer.input_size)
    with torch.no_grad(), set_current_vllm_config(llm.llm_engine.vllm_config):
        unit = torch.eye(min(columns, size), size, device=next(layer.parameters()).device, dtype=layer.params_dtype)
        return layer.quant_method.apply(layer, unit).float().clone().cpu()
