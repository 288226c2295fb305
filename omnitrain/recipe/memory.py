"""Memory of a device in each phase of a step, from sizes alone.

An estimate to decide with, not a measurement: weights, optimizer state and caches are exact, activations are the
large tensors that the layers keep. Frozen weights are sharded over all ranks, towers are whole on every rank, trained
weights are float32 with a gradient and two Adam moments.
"""

from dataclasses import dataclass
from functools import cached_property

from omnitrain.recipe.schema import Recipe
from omnitrain.recipe.sizes import GIB, Sizes

WIDTH = {"bfloat16": 2, "float32": 4}
CONTEXT_GIB = 1.5  # device context, communication buffers, kernels
PROCESS_GIB = 6.0  # host: Python, torch, vLLM and pinned staging of one rank
LOGIT_CHUNK = 2**26  # log-probs are computed in chunks of about so many logits


def longest(recipe: Recipe) -> int:
    """Tokens of the longest sequence: the prompt, and the response where its length is known."""
    response = recipe.rollout.max_new_tokens if recipe.rollout else recipe.data.max_response_tokens or 0
    return recipe.data.max_prompt_tokens + response


@dataclass(frozen=True)
class Phase:
    """What is in memory during one phase."""

    name: str
    parts: tuple[tuple[str, float], ...]
    """(what, GiB)."""

    @property
    def total(self) -> float:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Need:
    """The memory needs of a recipe on `devices` ranks. All results are GiB per device."""

    recipe: Recipe
    sizes: Sizes
    devices: int
    memory_gib: float | None

    @cached_property
    def width(self) -> int:
        return WIDTH[self.recipe.model.dtype]

    @cached_property
    def engine(self) -> bool:
        """Whether an engine with weights of its own is in the process."""
        return self.recipe.rollout is not None and self.recipe.rollout.engine == "vllm_omni"

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return longest(self.recipe)

    @cached_property
    def trained(self) -> int:
        """Trained parameters, over all ranks."""
        lora = self.recipe.model.lora
        return self.sizes.decoder if lora is None else self.sizes.lora(lora.rank, lora.module_names())

    def phases(self, sleep: str | None) -> tuple[Phase, ...]:
        """The phases of a step; without a rollout only the update."""
        if self.recipe.rollout is None:
            return (self.train(None),)
        rollout = self.rollout()
        reward = Phase("reward", rollout.parts + (("rewards (on the CPU, or elsewhere)", 0.0),))
        return (self.sync(), rollout, reward, self.train(sleep)) if self.engine else (rollout, reward, self.train(None))

    def resident(self) -> tuple[tuple[str, float], ...]:
        """What the trainer holds in every phase."""
        parts = [("context", CONTEXT_GIB), ("towers", self.sizes.towers * self.width / GIB)]
        if self.recipe.model.lora is not None:
            parts.append(("frozen weights, sharded", self.sizes.decoder * self.width / self.devices / GIB))
        parts.append(("trained weights and Adam", self.trained * 12 / self.devices / GIB))
        if self.recipe.train.ema is not None:
            parts.append(("moving average", self.trained * 4 / self.devices / GIB))
        if self.recipe.model.adapter is not None:
            parts.append(("starting adapter (reference)", self.trained * 4 / self.devices / GIB))
        return tuple(parts)

    def engine_weights(self) -> tuple[tuple[str, float], ...]:
        parallel = self.recipe.rollout.tensor_parallel
        size = self.sizes.decoder * self.width / parallel + self.sizes.towers * self.width
        return (("engine weights", size / GIB),)

    def kv_tokens(self) -> int | None:
        """Tokens that the engine's KV cache holds; None when it is not known."""
        if not self.engine or self.memory_gib is None:
            return None
        rollout = self.recipe.rollout
        room = rollout.gpu_memory_utilization * self.memory_gib - self.engine_weights()[0][1] - self._workspace()
        return max(0, int(room * GIB / self.sizes.kv_bytes(self.width, rollout.tensor_parallel)))

    def _workspace(self) -> float:
        """The engine's activations and logits at its largest batch."""
        rollout, sizes = self.recipe.rollout, self.sizes
        tokens = rollout.max_batched_tokens
        experts = tokens * max(1, sizes.experts_per_token) * (2 * sizes.hidden + 3 * sizes.intermediate) * self.width
        return (experts + rollout.max_concurrent * sizes.vocab * 4 * 2) / GIB

    def rollout(self) -> Phase:
        if not self.engine:
            return Phase(
                "rollout", self.resident() + (("activations", self._layer(backward=False)),) + self._gathered()
            )
        kv = self.sizes.kv_bytes(self.width, self.recipe.rollout.tensor_parallel)
        parts = self.engine_weights() + (("engine workspace", self._workspace()),)
        if self.memory_gib is None:
            # What one sequence needs; the engine takes whatever it is given.
            cache = kv * self.longest / GIB
        else:
            cache = self.recipe.rollout.gpu_memory_utilization * self.memory_gib - sum(size for _, size in parts)
        return Phase("rollout", self.resident() + parts + (("KV cache", max(0.0, cache)),))

    def sync(self) -> Phase:
        """The engine's weights are awake, its cache is not; one layer is gathered at a time."""
        lora = self.recipe.model.lora
        whole = lora is None or any(name in self.sizes.expert_projections for name in lora.module_names())
        layer = self.sizes.layer if whole else sum(i * o for i, o in self.sizes.projections.values())
        return Phase("sync", self.resident() + self.engine_weights() + (("one gathered layer", layer * 4 * 2 / GIB),))

    def train(self, sleep: str | None) -> Phase:
        train, sizes = self.recipe.train, self.sizes
        tokens = train.max_tokens_per_device
        if train.gradient_checkpointing:
            kept = sizes.layers * tokens * sizes.hidden * self.width / GIB
        else:
            kept = sizes.layers * self._layer(backward=False)
        parts = (
            ("gradients", self.trained * 4 / self.devices / GIB),
            ("activations", kept + self._layer(backward=True)),
            ("logits of a chunk", min(tokens * sizes.vocab, LOGIT_CHUNK) * 4 * 3 / GIB),
        )
        if mask := self._mask(tokens):
            parts += (("attention mask or scores", mask),)
        left = ()
        if self.engine and sleep in ("kv", "auto"):
            left = self.engine_weights()
        elif self.engine and sleep == "off":
            left = (("engine, not asleep", self.rollout().total - sum(size for _, size in self.resident())),)
        return Phase("train", self.resident() + parts + self._gathered() + left)

    def host(self) -> Phase:
        """Main memory of one rank. Sleeping engines are refilled from the trainer's weights, not from a host copy."""
        parts = (
            ("process", PROCESS_GIB),
            ("towers while loading", self.sizes.towers * self.width / GIB),
            ("one layer while loading", self.sizes.layer * self.width / GIB),
        )
        return Phase("host", parts)

    def checkpoint(self) -> float:
        """GiB on disk of one checkpoint, all ranks together: trained weights, Adam's moments, the moving average."""
        return self.trained * (12 if self.recipe.train.ema is None else 16) / GIB

    def disk(self) -> float:
        """GiB on disk of a run: the checkpoints that are kept, the one being written, and the starting adapter's copy."""
        kept = self.recipe.checkpoint.keep_last + (self.recipe.checkpoint.keep_best is not None) + 1
        start = self.trained * 4 / GIB if self.recipe.model.adapter is not None else 0.0
        return self.checkpoint() * kept + start

    def _gathered(self) -> tuple[tuple[str, float], ...]:
        """The layer at work and the next one, whole; one device needs no copy of a frozen layer."""
        if self.devices == 1 and self.recipe.model.lora is not None:
            return ()
        copies = 2 if self.recipe.model.lora is not None else 3  # full training also has the layer's gradient
        ends = 0 if self.devices == 1 else self.sizes.decoder - self.sizes.layers * self.sizes.layer
        return (("gathered layers and embeddings", (copies * self.sizes.layer + ends) * self.width / GIB),)

    def _layer(self, backward: bool) -> float:
        """Large tensors inside one layer for a full micro-batch."""
        sizes, tokens = self.sizes, self.recipe.train.max_tokens_per_device
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        attention = 4 * sizes.hidden + 3 * queries + 4 * keys
        experts = max(1, sizes.experts_per_token) * (2 * sizes.hidden + 3 * sizes.intermediate)
        return tokens * (attention + experts) * self.width * (2 if backward else 1) / GIB

    def _mask(self, tokens: int) -> float:
        attention = self.recipe.model.attention
        if attention == "sdpa":
            return tokens * tokens * (1 + self.width) / GIB
        if attention == "eager":
            return 3 * self.sizes.heads * tokens * tokens * 4 / GIB
        return 0.0
