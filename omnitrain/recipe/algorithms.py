"""The recipe's [algorithm] table: one class per algorithm. Imports no torch."""

from typing import Annotated, ClassVar, Literal, Union

from pydantic import Field, field_validator, model_validator

from omnitrain.recipe.base import Section


class Correction(Section):
    """Correct the update for what the rollout engine's log-probs differ from the trainer's.

    Truncated importance sampling (TIS), masking outside a band (IcePop), and rejection by a KL estimate.
    """

    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weight exp(trainer - rollout): none, of each token, or of the whole sequence."""

    limit: Literal["truncate", "mask"] = "truncate"
    """A weight above the cap is cut to it, or one outside [floor, cap] becomes 0."""

    cap: float = Field(2.0, ge=1)
    """Largest importance weight."""

    floor: float = Field(0.5, ge=0, le=1)
    """Smallest importance weight that limit = "mask" keeps."""

    reject: Literal["none", "token", "sequence"] = "none"
    """Leave tokens or whole sequences out of the loss and of its units by their estimated KL."""

    reject_kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimate: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, with d = trainer - rollout; a sequence's is its mean."""

    reject_low: float | None = None
    """Reject below this value."""

    reject_high: float | None = None
    """Reject above this value."""

    table: ClassVar[str] = "algorithm.correction"

    def unused(self) -> dict[str, str]:
        found = {}
        if self.weights == "none":
            found |= dict.fromkeys(("limit", "cap", "floor"), 'algorithm.correction.weights = "none"')
        elif self.limit == "truncate":
            found["floor"] = 'algorithm.correction.limit = "truncate"'
        if self.reject == "none":
            found |= dict.fromkeys(("reject_kl", "reject_low", "reject_high"), 'algorithm.correction.reject = "none"')
        return found

    @model_validator(mode="after")
    def _has_effect(self):
        low, high = self.reject_low, self.reject_high
        if self.weights == "none" and self.reject == "none":
            raise ValueError(
                "algorithm.correction has no effect: set algorithm.correction.weights or algorithm.correction.reject"
            )
        if self.reject != "none" and low is None and high is None:
            raise ValueError(
                f'algorithm.correction.reject = "{self.reject}" needs algorithm.correction.reject_low or reject_high'
            )
        if self.reject != "none" and self.reject_kl != "k1" and (high is not None and high < 0):
            raise ValueError(
                f"algorithm.correction.reject_high = {high} rejects everything: {self.reject_kl} is never below 0; "
                "raise it"
            )
        if self.reject != "none" and self.reject_kl != "k1" and (low is not None and low <= 0):
            raise ValueError(
                f"algorithm.correction.reject_low = {low} has no effect: {self.reject_kl} is never below 0; remove it"
            )
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"algorithm.correction.reject_low = {low} must be below algorithm.correction.reject_high = {high}"
            )
        return self


class _PolicyGradient(Section):
    """What GSPO and DAPO have in common."""

    kl: float = Field(0.0, ge=0)
    """Weight of the per-token k3 KL to the reference (adapter off, or the starting adapter)."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Whose log-probs the ratio is taken against: recomputed by the trainer, or the engine's own (no extra forward)."""

    advantage_std: bool = True
    """Divide advantages by the group's standard deviation; false is Dr. GRPO's."""

    leave_one_out: bool = False
    """Compare a response with the mean of the others in its group (RLOO), not with the mean of all."""

    combine: Literal["reward", "advantage"] = "reward"
    """Several rewards: their weighted sum gives one advantage, or each is normalised in its group and then weighted."""

    correction: Correction | None = None
    """Correction for the gap between the rollout engine's log-probs and the trainer's."""

    @property
    def online(self) -> bool:
        return True

    @model_validator(mode="after")
    def _bypass(self):
        if self.correction and self.correction.weights != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f'algorithm.correction.weights = "{self.correction.weights}" with algorithm.old_logprobs = "rollout": '
                "the ratio already starts from the engine's log-probs; remove the weights, or set old_logprobs = "
                '"trainer"'
            )
        return self


class Gspo(_PolicyGradient):
    """Group Sequence Policy Optimization (arXiv 2507.18071): one importance ratio per response."""

    kind: Literal["gspo"]
    """The algorithm."""

    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""

    clip_high: float = Field(4e-4, gt=0)
    """The ratio is clipped at 1 + clip_high."""


class Dapo(_PolicyGradient):
    """DAPO (arXiv 2503.14476): a ratio per token, clip-higher, token mean, dynamic sampling, overlong penalty."""

    kind: Literal["dapo"]
    """The algorithm."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""

    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped at 1 + clip_high."""

    dual_clip: float | None = Field(None, gt=1)
    """With a negative advantage the loss is at most dual_clip times its size; 3 is usual."""

    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean over the update's tokens, over its sequences' means (GRPO), or sum over max_new_tokens (Dr. GRPO)."""

    dynamic_sampling: bool = True
    """Leave out groups whose rewards are all equal and draw further prompts in their place."""

    max_generation_batches: int = Field(10, ge=1)
    """Most draws of one step, the first included; then it trains on the groups it has."""

    overlong_buffer: int = Field(0, ge=0)
    """The penalty for length rises over this many tokens before max_new_tokens; 0 is off (4096 of 20480 in the paper)."""

    overlong_penalty: float = Field(1.0, gt=0)
    """Penalty of a response as long as max_new_tokens."""

    table: ClassVar[str] = "algorithm"

    def unused(self) -> dict[str, str]:
        found = {}
        if not self.dynamic_sampling:
            found["max_generation_batches"] = "algorithm.dynamic_sampling = false"
        if not self.overlong_buffer:
            found["overlong_penalty"] = "algorithm.overlong_buffer = 0"
        return found


class Dpo(Section):
    """Direct Preference Optimization (arXiv 2305.18290), offline, on rows with `chosen` and `rejected`."""

    kind: Literal["dpo"]
    """The algorithm."""

    beta: float = Field(0.1, gt=0)
    """Strength of the tie to the reference."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's logistic loss, or IPO's squared one (arXiv 2310.12036)."""

    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the pairs taken to be labelled the wrong way round; sigmoid only."""

    average_logprobs: bool = False
    """Mean log-prob of a response's tokens instead of their sum."""

    reference: Literal["adapter", "precomputed"] = "adapter"
    """The model with its adapter off (or the starting adapter), or its log-probs computed once before step 1."""

    @property
    def online(self) -> bool:
        return False

    table: ClassVar[str] = "algorithm"

    def unused(self) -> dict[str, str]:
        return {"label_smoothing": 'algorithm.loss = "ipo"'} if self.loss == "ipo" else {}


class Sft(Section):
    """Supervised fine-tuning: cross-entropy on the answer (the row's `chosen`, else its `answer`)."""

    kind: Literal["sft"]
    """The algorithm."""

    template: str = "{answer}"
    """How the target response is written; `{answer}` is replaced."""

    @field_validator("template")
    @classmethod
    def _holds_the_answer(cls, value: str) -> str:
        if "{answer}" not in value:
            raise ValueError(f'algorithm.template = "{value}" holds no {{answer}}: all rows would have one target')
        return value

    @property
    def online(self) -> bool:
        return False


Algorithm = Annotated[Union[Gspo, Dapo, Dpo, Sft], Field(discriminator="kind")]
