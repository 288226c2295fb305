"""The sizes of a model that a plan needs, in numbers a family's spec.py fills in."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """A decoder with optional experts, and frozen towers. Counts are parameters unless said otherwise."""

    source: str
    """Where the numbers are from: a config.json or "published"."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    experts_per_token: int
    intermediate: int
    """Width of one expert."""
    max_positions: int
    """Longest sequence, prompt and response together."""
    tied: bool
    """The output head is the embedding."""
    towers: int
    """Frozen towers together; every rank holds them whole."""
    pixels_per_token: int = 1024
    """Pixels of a picture behind one token: (patch side x merged patches a side) ** 2."""
    frames_per_token: int = 2
    """Frames of a video behind one token."""
    sound_tokens_per_second: float = 13.0

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of the attention projections of a layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
        }

    @property
    def expert_projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of one expert's two matrices; the layer holds all experts' fused."""
        return {"gate_up_proj": (self.hidden, 2 * self.intermediate), "down_proj": (self.intermediate, self.hidden)}

    @property
    def layer(self) -> int:
        """One decoder layer."""
        attention = sum(inputs * outputs for inputs, outputs in self.projections.values())
        experts = self.experts * (3 * self.hidden * self.intermediate + self.hidden)  # the last is the router
        return attention + experts + 2 * self.hidden + 2 * self.head_dim  # the norms

    @property
    def decoder(self) -> int:
        """The text decoder with embeddings and head."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer + embeddings + self.hidden

    def lora(self, rank: int, targets: list[str]) -> int:
        """Adapters of this rank on the attention projections among `targets`, and on every expert's matrices."""
        ends = {name: (sum(pair), 1) for name, pair in self.projections.items()}
        ends |= {name: (sum(pair), self.experts) for name, pair in self.expert_projections.items()}
        return self.layers * rank * sum(ends[name][0] * ends[name][1] for name in targets if name in ends)

    def media_tokens(self, picture_pixels: int, frame_pixels: int, frames: int) -> dict[str, int]:
        """Most tokens of a picture of so many pixels, and of a video of so many frames of so many pixels."""
        grids = -(-frames // self.frames_per_token)
        return {
            "picture": max(1, picture_pixels // self.pixels_per_token),
            "video": grids * max(1, frame_pixels // self.pixels_per_token),
        }

    def kv_bytes(self, width: int, tensor_parallel: int) -> int:
        """KV cache of one token on one rank. A head cannot be split, so small head counts are repeated."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads * self.head_dim * width


def hub_name(name: str) -> bool:
    """Whether `name` can be a model's name on the hub, org/name, rather than a path."""
    return name.count("/") == 1 and all(name.split("/")) and not name.startswith((".", "/", "~"))
