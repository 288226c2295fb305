"""The recipe: one pydantic model per TOML table. Imports no torch."""

from typing import Any, Literal

from pydantic import Field, model_validator

from omnitrain.models.qwen3_omni.spec import Qwen3OmniModel
from omnitrain.recipe.algorithms import Algorithm
from omnitrain.recipe.base import Section
from omnitrain.recipe.data import Data
from omnitrain.recipe.rewards import Reward, check_rewards
from omnitrain.recipe.rollout import Rollout

GATES = ("g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10")
OFFLINE_GATES = {"sft": ("g3", "g10"), "dpo": ("g3", "g5", "g10")}

# Fields that only sampling reads, which an offline algorithm does not.
_DECODING = ("validate.temperature", "validate.top_p", "validate.top_k", "validate.max_new_tokens")
ONLINE_ONLY = (*_DECODING, "samples.every", "samples.groups")
OFFLINE_ONLY = ("data.max_response_tokens", "data.batches", "data.modality_weights")

# One line per family; with a second one this becomes Annotated[Union[...], Field(discriminator="family")].
Model = Qwen3OmniModel


class Ema(Section):
    """A moving average of the trained weights, in float32."""

    decay: float = Field(0.99, gt=0, lt=1)
    """Share of the average that stays at each refresh."""

    every: int = Field(1, ge=1)
    """Updates between refreshes."""


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

    ema: Ema | None = None
    """Keep a moving average of the trained weights, for validation and export."""

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
    """Use only the first rows of the validation data."""

    balance: Literal["none", "modality"] = "none"
    """With max_rows: take the first rows of the data, or as many of each modality."""

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


class Profile(Section):
    """Look at where a few steps spend their time and memory; the files are in the run's profile/."""

    steps: list[int] = [2]
    """Steps to record with torch's profiler: a chrome trace per rank. None ([]) leaves the device to Nsight Systems."""

    memory: bool = False
    """Also write a snapshot of the accelerator's memory after each of them."""

    nvtx: bool = False
    """Mark the phases of every step with NVTX ranges, for Nsight Systems."""

    @model_validator(mode="after")
    def _steps(self):
        if any(step < 1 for step in self.steps):
            raise ValueError(f"profile.steps = {self.steps}: steps are counted from 1")
        if not self.steps and (self.memory or not self.nvtx):
            what = "profile.memory = true" if self.memory else "[profile]"
            raise ValueError(f"{what} has no effect with profile.steps = []; name a step")
        return self


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
    profile: Profile | None = None

    @model_validator(mode="after")
    def _cross(self):
        if self.algorithm.online:
            self._check_online()
        else:
            self._check_offline()
        for field in self._without_effect():
            table, name = field.split(".")
            if name in getattr(self, _attribute(table)).model_fields_set:
                raise ValueError(f'{field} has no effect with algorithm.kind = "{self.algorithm.kind}"; remove it')
        if self.validate_.balance != "none" and self.validate_.max_rows is None:
            raise ValueError(f'validate.balance = "{self.validate_.balance}" needs validate.max_rows')
        if self.validate_.balance != "none" and self.data.validation is None:
            raise ValueError(f'validate.balance = "{self.validate_.balance}" needs data.validation')
        best = self.checkpoint.keep_best
        if best is not None and best.metric.startswith("val/") and self.data.validation is None:
            raise ValueError(f"checkpoint.keep_best.metric = {best.metric} needs data.validation")
        return self

    def _check_online(self) -> None:
        kind, algorithm, rollout = self.algorithm.kind, self.algorithm, self.rollout
        if rollout is None:
            raise ValueError(f'algorithm.kind = "{kind}" needs a [rollout] table')
        if not self.rewards:
            raise ValueError(f'algorithm.kind = "{kind}" needs at least one [[rewards]] table')
        check_rewards(self.rewards, rollout.max_new_tokens)
        if rollout.group_size < 2:
            raise ValueError(
                f'rollout.group_size = {rollout.group_size} with algorithm.kind = "{kind}": '
                "a group of one has no advantage; set rollout.group_size to 2 or more"
            )
        if algorithm.kl > 0 and self.model.lora is None:
            raise ValueError(
                f"algorithm.kl = {algorithm.kl} without model.lora: the reference is the model with its adapter "
                "off; add model.lora or set algorithm.kl = 0"
            )
        if kind == "dapo" and algorithm.overlong_buffer > rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer = {algorithm.overlong_buffer} is more than rollout.max_new_tokens = "
                f"{rollout.max_new_tokens}; the penalty would begin before the first token"
            )

    def _check_offline(self) -> None:
        kind = self.algorithm.kind
        for table in ("rollout", "rewards"):
            if getattr(self, table):
                raise ValueError(f'[{table}] has no effect with algorithm.kind = "{kind}"; remove it')
        if kind == "dpo" and self.algorithm.reference == "adapter" and self.model.lora is None:
            raise ValueError(
                'algorithm.reference = "adapter" without model.lora: there is no adapter to switch off; add model.lora '
                'or set algorithm.reference = "precomputed"'
            )
        if unknown := [gate for gate in self.gates.skip if gate not in self.gate_names]:
            raise ValueError(
                f'gates.skip: {", ".join(unknown)} has no effect with algorithm.kind = "{kind}", which has '
                f"{', '.join(self.gate_names)}; remove it"
            )

    @property
    def gate_names(self) -> tuple[str, ...]:
        """The gates that run with this algorithm."""
        return GATES if self.algorithm.online else OFFLINE_GATES[self.algorithm.kind]

    def _without_effect(self) -> tuple[str, ...]:
        """Fields that this algorithm never reads."""
        return OFFLINE_ONLY if self.algorithm.online else ONLINE_ONLY

    def plain(self) -> dict[str, Any]:
        """Plain data that validates to an equal recipe: absent values and fields without effect are left out."""
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for field in self._without_effect():
            table, name = field.split(".")
            data[table].pop(name, None)
        return data


def _attribute(table: str) -> str:
    return "validate_" if table == "validate" else table
