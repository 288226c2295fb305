"""The recipe: one pydantic model per TOML table. Imports no torch."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from omnitrain.models.qwen3_omni.spec import Qwen3OmniModel
from omnitrain.recipe.base import Section

GATES = ("g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10")

# Fields that only sampling or the gates read: an offline algorithm does neither.
_DECODING = ("validate.temperature", "validate.top_p", "validate.top_k", "validate.max_new_tokens")
ONLINE_ONLY = (*_DECODING, "samples.every", "samples.groups", "gates.skip")

# One line per family; with a second one this becomes Annotated[Union[...], Field(discriminator="family")].
Model = Qwen3OmniModel


class Data(Section):
    """The rows, written by `omnitrain prepare`."""

    train: Path
    """Parquet file of training rows."""

    validation: Path | None = None
    """Parquet file of validation rows."""

    max_prompt_tokens: int = Field(2048, ge=1)
    """Longest prompt, in tokens, media tokens included."""

    overlong: Literal["drop", "error"] = "drop"
    """What to do with a longer prompt. A prompt is never cut."""

    system: str | None = None
    """Replaces the system turn of every row; an empty string removes it."""

    shuffle: bool = True
    """Draw the rows in a new order every epoch, from the seed."""


class Gspo(Section):
    """Group Sequence Policy Optimization (arXiv 2507.18071): one importance ratio per response."""

    kind: Literal["gspo"]
    """The algorithm."""

    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""

    clip_high: float = Field(4e-4, gt=0)
    """The ratio is clipped at 1 + clip_high."""

    kl: float = Field(0.0, ge=0)
    """Weight of the per-token k3 KL to the reference (adapter off)."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Whose log-probs the ratio is taken against: recomputed by the trainer, or the engine's own (no extra forward)."""

    @property
    def online(self) -> bool:
        return True


class Sft(Section):
    """Supervised fine-tuning: cross-entropy on the answer (the row's `chosen`, else its `answer`)."""

    kind: Literal["sft"]
    """The algorithm."""

    template: str = "{answer}"
    """How the target response is written; `{answer}` is replaced."""

    @property
    def online(self) -> bool:
        return False


Algorithm = Annotated[Union[Gspo, Sft], Field(discriminator="kind")]


class _Rollout(Section):
    group_size: int = Field(16, ge=1)
    """Responses per prompt."""

    max_new_tokens: int = Field(1024, ge=1)
    """Longest response, in tokens."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by it too."""

    max_concurrent: int = Field(256, ge=1)
    """Most responses an engine works on at once."""


class VllmOmniRollout(_Rollout):
    """vLLM-Omni inside each training process."""

    engine: Literal["vllm_omni"] = "vllm_omni"
    """The rollout engine."""

    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one engine; must divide the number of ranks."""

    gpu_memory_utilization: float = Field(0.7, gt=0, lt=1)
    """Share of the accelerator's memory that the engine may fill while it is awake."""

    sleep: Literal["auto", "off", "kv", "weights"] = "auto"
    """What the engine gives back between rollouts: nothing, its KV cache, or its weights as well."""

    prefix_caching: bool = True
    """Share the KV cache of equal prompt beginnings."""

    enforce_eager: bool = False
    """Do not capture device graphs."""

    max_batched_tokens: int = Field(8192, ge=64)
    """Most tokens in one engine step."""


class TrainerRollout(_Rollout):
    """The trainer's own module samples, token by token: slow, and the oracle for every other engine."""

    engine: Literal["trainer"]
    """The rollout engine."""


def _engine(value: Any) -> str:
    engine = value.get("engine", "vllm_omni") if isinstance(value, dict) else getattr(value, "engine", "?")
    return engine if isinstance(engine, str) else "?"


Rollout = Annotated[
    Union[Annotated[VllmOmniRollout, Tag("vllm_omni")], Annotated[TrainerRollout, Tag("trainer")]],
    Discriminator(_engine),
]


_NUMBER = re.compile(r"[-+0-9.eE]+")


class _Reward(Section):
    weight: float = 1.0
    """Weight in the sum of rewards."""

    timeout: float = Field(30.0, gt=0)
    """Seconds one sample may take."""

    on_failure: str = "fail"
    """"fail" stops the run, "skip" leaves the sample out, "value:x" uses x instead."""

    @field_validator("on_failure")
    @classmethod
    def _number(cls, value: str) -> str:
        text = value.removeprefix("value:")
        if text == value and value not in ("fail", "skip"):
            raise ValueError(f'on_failure = "{value}" is not "fail", "skip" or "value:NUMBER"')
        try:
            finite = text == value or (_NUMBER.fullmatch(text) and math.isfinite(float(text)))
        except ValueError:
            finite = False
        if not finite:
            raise ValueError(f'on_failure = "{value}" needs a finite number after "value:"')
        return value


class ChoiceReward(_Reward):
    """1 if the single <answer>X</answer> of the response is the label, else 0."""

    kind: Literal["choice"]
    """The reward."""


class MathReward(_Reward):
    """1 if the boxed, tagged or last number of the response equals the label, else 0."""

    kind: Literal["math"]
    """The reward."""


class PythonReward(_Reward):
    """A function of your own: `function(response: str, row: dict) -> float`, one finite number.

    `row` has id (str), answer (str or None; of choice data "<answer>A</answer>"), source (str) and meta (dict).
    What it prints goes to logs/rewards_RANK.log. See docs/rewards.md.
    """

    kind: Literal["python"]
    """The reward."""

    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """Where it is: "package.module:function", importable from the working directory."""


Reward = Annotated[Union[ChoiceReward, MathReward, PythonReward], Field(discriminator="kind")]


class Train(Section):
    """The update. Only these fields and the group size fix the mathematics; ranks and micro-batches never change it."""

    prompts_per_step: int = Field(ge=1)
    """Prompts drawn for one step (one rollout)."""

    prompts_per_update: int | None = Field(None, ge=1)
    """Prompts per optimizer update; divides prompts_per_step. Default: all, one update per step."""

    max_tokens_per_device: int = Field(16384, ge=1)
    """Most tokens in one packed micro-batch on one device."""

    learning_rate: float = Field(ge=0)
    """Peak learning rate; 0 is the control that must not learn."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, counted in updates."""

    warmup_updates: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0."""

    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""

    grad_clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""

    max_steps: int | None = Field(None, ge=1)
    """Stop after this many steps."""

    epochs: int | None = Field(None, ge=1)
    """Stop after this many passes over the training rows. One of max_steps and epochs is needed."""

    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""

    @model_validator(mode="after")
    def _counts(self):
        if self.max_steps is None and self.epochs is None:
            raise ValueError("train.max_steps and train.epochs are both missing; set one")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas = {list(self.betas)}: each must be at least 0 and below 1")
        n, m = self.prompts_per_step, self.prompts_per_update
        if m and n % m:
            low, high = m * max(1, n // m), m * (n // m + 1)
            raise ValueError(
                f"train.prompts_per_step = {n} is not divisible by train.prompts_per_update = {m}; "
                f"nearest: prompts_per_step = {low} or {high}"
            )
        return self


class Validate(Section):
    """Validation: at step 0, every N steps, at the end; fixed rows in a fixed order."""

    every: int | None = Field(None, ge=1)
    """Steps between validations; without it only at the start and the end."""

    at_start: bool = True
    """Validate before the first step."""

    max_rows: int | None = Field(None, ge=1)
    """Use only the first rows of the validation file."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; validation only."""

    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens, 0 for all; validation only."""

    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response; default rollout.max_new_tokens."""


class KeepBest(Section):
    """Keep the best checkpoint by a metric of metrics.jsonl."""

    metric: str
    """Name in metrics.jsonl, such as "val/avqa/accuracy"."""

    mode: Literal["max", "min"] = "max"
    """Whether larger is better."""


class Checkpoint(Section):
    """Checkpoints, written whole or not at all."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints; the end of the run always saves one."""

    keep_last: int = Field(2, ge=1)
    """How many of the newest to keep."""

    keep_best: KeepBest | None = None
    """Also keep the best one."""


class Samples(Section):
    """What is written to samples/step_N."""

    every: int = Field(10, ge=1)
    """Steps between sample dumps; the first and last step always write one."""

    groups: int = Field(4, ge=1)
    """Groups written, each with its best and worst response."""


class Gates(Section):
    """Checks that stop a run at step 0 when it would train the wrong thing."""

    skip: list[Literal[GATES]] = []
    """Gates not to run, by name."""


class Wandb(Section):
    """Weights & Biases; offline when there is no network."""

    project: str
    """The project's name."""


class Trackers(Section):
    """Optional sinks beside metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events to logs/."""

    wandb: Wandb | None = None
    """Also log to Weights & Biases."""


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run directory, runs/<name>."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Every random choice follows from it."""

    deterministic: bool = False
    """Assign prompts to ranks by index, never by who is free first."""

    model: Model
    data: Data
    algorithm: Algorithm
    rollout: Rollout | None = None
    rewards: list[Reward] = []
    train: Train
    validate_: Validate = Field(default_factory=Validate, alias="validate")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    samples: Samples = Field(default_factory=Samples)
    gates: Gates = Field(default_factory=Gates)
    trackers: Trackers = Field(default_factory=Trackers)

    @model_validator(mode="after")
    def _cross(self):
        kind = self.algorithm.kind
        if self.algorithm.online:
            if self.rollout is None:
                raise ValueError(f'algorithm.kind = "{kind}" needs a [rollout] table')
            if not self.rewards:
                raise ValueError(f'algorithm.kind = "{kind}" needs at least one [[rewards]] table')
            if self.rollout.group_size < 2:
                raise ValueError(
                    f'rollout.group_size = {self.rollout.group_size} with algorithm.kind = "{kind}": '
                    "a group of one has no advantage; set rollout.group_size to 2 or more"
                )
            if self.algorithm.kl > 0 and self.model.lora is None:
                raise ValueError(
                    f"algorithm.kl = {self.algorithm.kl} without model.lora: the reference is the model with its adapter "
                    "off; add model.lora or set algorithm.kl = 0"
                )
        else:
            for table in ("rollout", "rewards"):
                if getattr(self, table):
                    raise ValueError(f'[{table}] has no effect with algorithm.kind = "{kind}"; remove it')
            tables = {"validate": self.validate_, "samples": self.samples, "gates": self.gates}
            for field in ONLINE_ONLY:
                table, name = field.split(".")
                if name in tables[table].model_fields_set:
                    raise ValueError(f'{field} has no effect with algorithm.kind = "{kind}"; remove it')
        best = self.checkpoint.keep_best
        if best is not None and best.metric.startswith("val/") and self.data.validation is None:
            raise ValueError(f"checkpoint.keep_best.metric = {best.metric} needs data.validation")
        return self

    def plain(self) -> dict[str, Any]:
        """Plain data that validates to an equal recipe: absent values and fields without effect are left out."""
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for field in () if self.algorithm.online else ONLINE_ONLY:
            table, name = field.split(".")
            data[table].pop(name, None)
        return data
