"""The trained Thinker: built empty, sharded, filled by slices, and asked for log-probs of packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from omnitrain import device as devices
from omnitrain.data.sample import Prompt
from omnitrain.errors import ModelError
from omnitrain.models.qwen3_omni import audio, lora, towers
from omnitrain.models.qwen3_omni.head import LogprobHead, Question
from omnitrain.models.qwen3_omni.packing import Packed, pack
from omnitrain.models.qwen3_omni.spec import EXPERTS, Qwen3OmniModel
from omnitrain.models.qwen3_omni.weights import (
    Checkpoint,
    Kept,
    exchanged,
    local_rows,
    merge,
    published,
    published_names,
    shard_of,
    whole,
)

TOWERS = ("visual", "audio_tower")
# The engine loads these together, so that pushing one means pushing all: one tensor, and one kernel's weights.
_TOGETHER_IN_ENGINE = (("q_proj", "k_proj", "v_proj"), EXPERTS)


class ThinkerPolicy:
    """Qwen3-Omni's Thinker as a policy. The towers are frozen and whole on every rank.

    With `model.lora` the text decoder is frozen in `model.dtype` and carries float32 adapters;
    without, it is trained: float32 weights, sharded, computed with in `model.dtype`.
    Every method that runs the model is a collective of the ranks of `mesh`.

    Raises ModelError for a checkpoint or LoRA targets that cannot be used.
    """

    def __init__(
        self,
        model: Qwen3OmniModel,
        *,
        mesh: DeviceMesh | None,
        device: torch.device,
        seed: int,
        gradient_checkpointing: bool,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = getattr(torch, model.dtype)
        if mesh is None and model.lora is None and self.dtype != torch.float32:
            raise ValueError("full training in bfloat16 keeps float32 weights under FSDP and needs a mesh")
        checkpoint = Checkpoint(model.path)
        with devices.forked_rng(self.device):
            self._thinker = _build(checkpoint.config, model, self.device)
            self.module: nn.Module = lora.wrap(self._thinker, model.lora) if model.lora else self._thinker
        _set_trainable(self._thinker, self.dtype, full=model.lora is None)
        if gradient_checkpointing:
            self._thinker.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if mesh is not None:
            _shard(self._thinker, mesh, self.dtype)
        self._load(checkpoint, seed)
        audio.attach(self._thinker)
        towers.attach(self._thinker)
        _attach_placeholders(self._thinker)
        self.module.train()

        # By transformers' name, as sharded: a module's own parameters are swapped for whole ones while it runs.
        targets = model.lora.module_names() if model.lora else []
        self._params = {lora.plain_name(name, targets): p for name, p in self.module.named_parameters()}
        self._adapters = lora.adapters(self.module)
        self._start: dict[str, Tensor] = {}
        self._kept = Kept()

    def _load(self, checkpoint: Checkpoint, seed: int) -> None:
        named = dict(self.module.named_parameters())
        base = {name: lora.plain_name(name) for name in named if not lora.is_adapter(name)}
        checkpoint.require({plain: named[name].shape for name, plain in base.items()})
        state = {name: local_rows(checkpoint, plain, named[name], self.device) for name, plain in base.items()}
        state |= lora.initial({n: p for n, p in named.items() if lora.is_adapter(n)}, seed, self.device)
        self.module.load_state_dict(state, assign=True, strict=False)
        # Buffers (rotary frequencies) are not in checkpoints; they were computed when the model was built.
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)

    # -- what the loop asks

    def logprobs(
        self, batch: list[tuple[Prompt, list[int]]], temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of every response token under softmax(logits / temperature), one packed row.

        Args:
            batch: (prompt, response ids) pairs; an empty list still runs the model, on one token.
            temperature: the rollout's.
            entropy: whether to return the entropies as well.

        Returns:
            Log-probs (N,) and entropies (N,) or None, float32, N response tokens in order. Entropies carry no gradient.
        """
        packed = pack(batch, self.device)
        return self._ask(packed, Question(packed.index, packed.labels, temperature, entropy))

    @torch.no_grad()
    def next_logits(self, batch: list[tuple[Prompt, list[int]]]) -> Tensor:
        """Logits (B, V), float32, of the token that follows each (prompt, response so far)."""
        packed = pack(batch, self.device)
        return self._ask(packed, Question(packed.last, None))

    def _ask(self, packed: Packed, question: Question):
        for tower in TOWERS:
            getattr(self._thinker, tower).eval()
        self._thinker.sampled_positions, self._thinker.media_order = packed.sampled, packed.media_order
        try:
            with self._thinker.lm_head.asked(question):
                answer = self.module(**packed.inputs, use_cache=False).logits
        finally:
            self._thinker.sampled_positions, self._thinker.media_order = None, {}
        if not torch.is_grad_enabled() and isinstance(self._thinker, FSDPModule):
            # Without a backward pass the root would stay whole, and stale after the next optimizer step.
            self._thinker.reshard()
        return answer

    @contextmanager
    def reference(self):
        """The reference policy: inside, the adapter is off, or is the one that it started from (`start_from`).

        Raises ModelError without model.lora.
        """
        if not self._adapters:
            raise ModelError("the reference is the model with its adapter off, but model.lora is not set")
        if self._start:
            with exchanged((self._params[name], value) for name, value in self._start.items()):
                yield
        else:
            with self.module.disable_adapter():
                yield

    @torch.no_grad()
    def start_from(self, adapter: dict[str, Tensor]) -> None:
        """Make this adapter, whole tensors by their names in `trainable`, the trained one and, as a copy, the reference."""
        trained = dict(self.trainable())
        if wrong := sorted(trained.keys() ^ adapter.keys()):
            raise ModelError(f"the starting adapter has other parameters: {', '.join(wrong[:3])}")
        for name, parameter in trained.items():
            if adapter[name].shape != parameter.shape:
                raise ModelError(
                    f"the starting adapter's {name} is {tuple(adapter[name].shape)}, here {tuple(parameter.shape)}: "
                    "model.adapter was trained on another model than model.path"
                )
            parameter.copy_(shard_of(adapter[name].to(parameter.device, parameter.dtype), parameter))
            self._start[name] = parameter.detach().clone()

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters by transformers' name, LoRA as "...q_proj.lora_A.weight". DTensors where sharded."""
        return [(name, p) for name, p in self._params.items() if p.requires_grad]

    @property
    def lora_count(self) -> int:
        """Parameters that carry an adapter: a projection's weight, or one of a layer's two fused expert tensors."""
        return len(self._adapters)

    # -- weights for the engine

    def stream_weights(self, full: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (published name, tensor in model.dtype on this device), adapters merged, layer by layer.

        Without `full`: what training changes, with the q, k and v of a layer together, and its experts. With it:
        every parameter, towers included. A collective: every rank iterates to the end, each gets every tensor.
        """
        self._kept = Kept()
        for name in self._streamed(full):
            with torch.no_grad():
                tensor = self._for_engine(name)
            yield from published(name, tensor)

    def _for_engine(self, name: str) -> Tensor:
        adapter = self._adapters.get(name)
        if adapter is None:
            return whole(self._params[name], self.dtype)
        a, b = adapter.factors(*(whole(self._params[n]) for n in (adapter.a, adapter.b)))
        return merge(whole(self._params[name]), a, b, adapter.scale, self.dtype, self._kept)

    def _streamed(self, full: bool) -> list[str]:
        names = [name for name in self._params if not lora.is_adapter(name)]
        if full:
            return names
        if not self._adapters:
            return [name for name in names if self._params[name].requires_grad]
        chosen = set()
        for name in self._adapters:
            parent, leaf = name.removesuffix(".weight").rsplit(".", 1)
            together = next((group for group in _TOGETHER_IN_ENGINE if leaf in group), (leaf,))
            chosen |= {name.replace(f"{parent}.{leaf}", f"{parent}.{other}") for other in together}
        return [name for name in names if name in chosen]

    def expected_names(self, full: bool = False) -> set[str]:
        """The names that `stream_weights(full)` yields."""
        return {stored for name in self._streamed(full) for stored in published_names(name, self._params[name].shape)}

    @property
    def delta_kept(self) -> float:
        """Share of the LoRA deltas that survived the last stream's cast (1 in float32, 0 when all vanished)."""
        return self._kept.share


def _build(config, model: Qwen3OmniModel, device: torch.device):
    """The thinker with parameters on meta and real buffers."""
    from accelerate import init_empty_weights
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker
    from transformers.utils import is_flash_attn_2_available

    if model.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ModelError('model.attention = "flash_attention_2" needs the package flash_attn; install it or use "sdpa"')
    config = config.thinker_config
    tower = "flash_attention_2" if model.attention == "flash_attention_2" else "sdpa"
    config._attn_implementation = {
        "": model.attention, "text_config": model.attention, "vision_config": tower, "audio_config": tower,
    }  # fmt: skip
    with init_empty_weights(include_buffers=False):
        thinker = Thinker(config)
        text = config.text_config
        thinker.lm_head = LogprobHead(text.hidden_size, text.vocab_size, bias=False)
    thinker.set_experts_implementation(devices.experts_implementation(device))
    return thinker


def _attach_placeholders(thinker) -> None:
    """Look for media placeholders in prompts only.

    transformers (5.14, 5.17) takes every media token in the row for a placeholder, also one that the policy sampled, and
    then fails for want of features. The engine reads such a token as the ordinary token it is.
    """
    original = thinker.get_placeholder_mask

    def get_placeholder_mask(self, input_ids, *args, **kwargs):
        if self.sampled_positions is not None:
            input_ids = input_ids.masked_fill(self.sampled_positions, 0)
        return original(input_ids, *args, **kwargs)

    thinker.sampled_positions = None
    thinker.get_placeholder_mask = MethodType(get_placeholder_mask, thinker)


def _set_trainable(thinker, dtype: torch.dtype, *, full: bool) -> None:
    """Choose which (meta) parameters are trained, and every parameter's dtype."""
    for name, p in thinker.named_parameters():
        adapter, tower = lora.is_adapter(name), name.startswith(TOWERS)
        p.requires_grad_(adapter or (full and not tower))
        p.data = p.data.to(torch.float32 if p.requires_grad else dtype)


def _shard(thinker, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 around each decoder layer and the root.

    The towers stay out: a rank whose micro-batch has no picture does not run the vision tower, and its
    collectives would wait for ever.
    """
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    towers = {p for tower in TOWERS for p in getattr(thinker, tower).parameters()}
    for layer in thinker.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The root holds the head, whose weight the backward pass needs first: keep it whole until then.
    fully_shard(thinker, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=towers)
