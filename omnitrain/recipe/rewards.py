"""The recipe's [[rewards]] tables: one class per reward. Imports no torch."""

import math
import re
from typing import Annotated, Literal, Union
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from omnitrain.recipe.base import Section

_NUMBER = re.compile(r"[-+0-9.eE]+")


class _Reward(Section):
    weight: float = 1.0
    """Weight in the sum of rewards."""

    timeout: float = Field(30.0, gt=0)
    """Seconds one sample may take."""

    on_failure: str = "fail"
    """"fail" stops the run, "skip" leaves the sample out, "value:x" uses x instead."""

    sources: list[str] | None = Field(None, min_length=1)
    """Rows it scores, by their `source`; default all."""

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


class Mmk12Reward(_Reward):
    """School mathematics with a picture: (accuracy + 0.3 f) / 1.3, f = 0, 0.5 or 1 for an answer tag and a box in it.

    A choice answer counts by its letter or by the option's value.
    """

    kind: Literal["mmk12"]
    """The reward."""


class FormatReward(_Reward):
    """1 if the whole response is <think>..</think><answer>..</answer>, or matches `pattern`; else 0."""

    kind: Literal["format"]
    """The reward."""

    pattern: str | None = Field(None, min_length=1)
    """A regular expression (Python's; the dot matches newlines) that the whole response must match."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"pattern = {value!r} is not a regular expression: {error}") from None
        return value


class LengthReward(_Reward):
    """Soft penalty of long responses: 0, then falling to -1 over the last `buffer` tokens before `limit`."""

    kind: Literal["length"]
    """The reward."""

    buffer: int = Field(ge=1)
    """Tokens before `limit` over which the penalty grows."""

    limit: int | None = Field(None, ge=1)
    """Response length, in tokens, of the whole penalty; default the most that the response could have had."""

    @model_validator(mode="after")
    def _order(self):
        if self.limit is not None and self.buffer > self.limit:
            raise ValueError(f"buffer = {self.buffer} is more than limit = {self.limit}; make it smaller")
        return self


class PythonReward(_Reward):
    """A function of your own: `function(response: str, row: dict) -> float`, one finite number.

    `row` has id (str), answer (str or None; of choice data "<answer>A</answer>"), source (str), meta (dict) and more.
    What it prints goes to logs/rewards_RANK.log. See docs/rewards.md.
    """

    kind: Literal["python"]
    """The reward."""

    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """Where it is: "package.module:function", importable from the working directory."""


class _Endpoint(_Reward):
    url: str
    """Where the server listens; http:// or https://."""

    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the key, sent as "Authorization: Bearer KEY". The key itself is in no recipe."""

    timeout: float = Field(120.0, gt=0)
    """Seconds one sample may take, repeated requests and their waits included."""

    retries: int = Field(5, ge=0)
    """Repeated requests after 408, 429, 5xx, a refused or a broken connection; the waits between them double."""

    concurrency: int = Field(32, ge=1)
    """Samples under way at once, from each rank that samples."""

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
        except ValueError:
            known = False
        if not known or re.search(r"\s", value):
            raise ValueError(f'url = "{value}" is not of the form http://host:port/path')
        if parts.username or parts.password:
            raise ValueError("url holds a user name or password; put the key into an environment variable, api_key_env")
        return value


class HttpReward(_Endpoint):
    """A scorer of your own behind HTTP: POST of a JSON object, reply {"score": x}. See docs/rewards.md."""

    kind: Literal["http"]
    """The reward."""

    health: str | None = Field(None, pattern=r"^/\S*$")
    """Path to GET at the start, such as "/health"; without it an empty sample is posted to `url`."""

    media: bool = False
    """Also send the prompt's media files; the request is then multipart/form-data."""


class _Judge(_Endpoint):
    model: str = Field(min_length=1)
    """Name that the endpoint serves the model by."""

    attempts: int = Field(3, ge=1)
    """Questions asked until an answer can be read; the first is greedy, further ones are sampled."""

    max_tokens: int = Field(512, ge=1)
    """Longest answer of the model."""

    @field_validator("url")
    @classmethod
    def _base(cls, value: str) -> str:
        if value.rstrip("/").endswith("/completions"):
            raise ValueError(f'url = "{value}" must be the part before /chat/completions, such as http://host:8000/v1')
        return value


class UnifiedReward(_Judge):
    """A vision-language model behind an OpenAI-compatible endpoint judges the response to the prompt and its media.

    It gives 1 to 5 points on each axis; the reward is their mean, mapped to 0..1.
    """

    kind: Literal["unified_reward"]
    """The reward."""

    axes: list[str] = Field(["relevance", "accuracy", "clarity"], min_length=1)
    """What is judged, each 1 to 5."""

    @field_validator("axes")
    @classmethod
    def _distinct(cls, value: list[str]) -> list[str]:
        for axis in value:
            if not re.fullmatch(r"[^\W\d_][\w -]*", axis):
                raise ValueError(f'axes: "{axis}" must be a word or a few, without punctuation')
        if len({axis.strip().lower() for axis in value}) < len(value):
            raise ValueError(f"axes = {value} names one axis twice")
        return value


class GenrmOcrReward(_Judge):
    """A vision-language model behind an OpenAI-compatible endpoint reads the text of a generated picture.

    1 - min(edit distance, n) / n against the n characters asked for; 1 if they stand in what it read.
    """

    kind: Literal["genrm_ocr"]
    """The reward."""


Reward = Annotated[
    Union[
        ChoiceReward,
        MathReward,
        Mmk12Reward,
        FormatReward,
        LengthReward,
        PythonReward,
        HttpReward,
        UnifiedReward,
        GenrmOcrReward,
    ],
    Field(discriminator="kind"),
]


def check_rewards(rewards: list[Reward], max_new_tokens: int) -> None:
    """Raise ValueError for a reward that could have no effect on responses of text of up to `max_new_tokens`."""
    for index, reward in enumerate(rewards):
        if reward.kind == "genrm_ocr":
            raise ValueError(f'rewards[{index}].kind = "genrm_ocr" reads pictures, and this model writes text')
        if reward.kind != "length":
            continue
        limit = reward.limit or max_new_tokens
        if reward.buffer > limit:
            raise ValueError(
                f"rewards[{index}].buffer = {reward.buffer} is more than rollout.max_new_tokens = {limit}; make it smaller"
            )
        if limit - reward.buffer >= max_new_tokens:
            raise ValueError(
                f"rewards[{index}]: the penalty starts at limit - buffer = {limit - reward.buffer} tokens, and "
                f"rollout.max_new_tokens = {max_new_tokens} ends every response before; lower limit or raise buffer"
            )
