"""The recipe's [data] table. Imports no torch."""

from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from omnitrain.recipe.base import Section

MODALITIES = ("text", "image", "audio", "video", "image+audio", "image+video", "audio+video", "image+audio+video")
"""What rows are named by: their media, in this order."""

class TrainFile(NamedTuple):
    """One training file and its share of the draws; without a weight it is drawn from by its number of rows."""

    path: Path
    weight: float | None


class Pixels(Section):
    """How large a picture may be; a smaller or larger one is scaled, its shape kept."""

    min_pixels: int = Field(3136, ge=1)
    """Fewest pixels of a picture."""

    max_pixels: int = Field(602112, ge=1)
    """Most pixels of a picture."""

    table: ClassVar[str] = "data.image"

    @model_validator(mode="after")
    def _order(self):
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"{self.table}.min_pixels = {self.min_pixels} is more than {self.table}.max_pixels = {self.max_pixels}"
            )
        return self


class Video(Pixels):
    """Which frames of a video are seen, and how large."""

    fps: float = Field(2.0, gt=0)
    """Frames per second."""

    min_frames: int = Field(4, ge=2)
    """Fewest frames of a video; a short one is seen more often than fps says."""

    max_frames: int = Field(8, ge=2)
    """Most frames of a video; of a long one they are spread over its whole length."""

    min_pixels: int = Field(100352, ge=1)
    """Fewest pixels of a frame."""

    table: ClassVar[str] = "data.video"

    @model_validator(mode="after")
    def _frames(self):
        if self.min_frames > self.max_frames:
            raise ValueError(
                f"data.video.min_frames = {self.min_frames} is more than data.video.max_frames = {self.max_frames}"
            )
        return self


class Data(Section):
    """The rows, written by `omnitrain prepare`."""

    train: Path | list[Path]
    """Parquet file of training rows, or a list of such files."""

    train_weights: list[float] | None = None
    """Share of the draws of each training file; without it every row is as likely as any other."""

    validation: Path | list[Path] | None = None
    """Parquet file of validation rows, or a list of such files."""

    max_prompt_tokens: int = Field(2048, ge=1)
    """Longest prompt, in tokens, media tokens included."""

    max_response_tokens: int | None = Field(None, ge=1)
    """Longest given response, in tokens (offline algorithms); rows with a longer one count as overlong."""

    overlong: Literal["drop", "error"] = "drop"
    """What to do with a longer prompt. A prompt is never cut."""

    system: str | None = None
    """Replaces the system turn of every row; an empty string removes it."""

    shuffle: bool = True
    """Draw the rows in a new order every epoch, from the seed."""

    batches: Literal["mixed", "modality"] = "mixed"
    """What a step's rows have in common: nothing, or their modality (offline algorithms)."""

    modality_weights: dict[str, float] | None = None
    """With batches = "modality": how often each comes, such as { image = 1, audio = 1 }; default equally often."""

    image: Pixels = Field(default_factory=Pixels)

    video: Video = Field(default_factory=Video)

    use_audio_in_video: bool | Literal["separate"] = False
    """A video's sound track: ignored, heard between its frames (true), or heard after it as a sound of its own."""

    @property
    def train_files(self) -> list[TrainFile]:
        paths = self.train if isinstance(self.train, list) else [self.train]
        return [TrainFile(path, weight) for path, weight in zip(paths, self.train_weights or [None] * len(paths))]

    @property
    def validation_files(self) -> list[Path]:
        if self.validation is None:
            return []
        return self.validation if isinstance(self.validation, list) else [self.validation]

    @field_validator("train", "validation")
    @classmethod
    def _some(cls, value, info):
        if isinstance(value, list) and not value:
            raise ValueError(f"data.{info.field_name} is an empty list; name a parquet file")
        if isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError(f"data.{info.field_name} names a file twice; a file's share is data.train_weights")
        return value

    @model_validator(mode="after")
    def _weights(self):
        if self.train_weights is not None:
            files = len(self.train) if isinstance(self.train, list) else 1
            if len(self.train_weights) != files:
                raise ValueError(
                    f"data.train_weights has {len(self.train_weights)} numbers for {files} files of data.train; "
                    "give one for each"
                )
        for field, weights in (
            ("train_weights", self.train_weights or []),
            ("modality_weights", (self.modality_weights or {}).values()),
        ):
            if any(weight <= 0 for weight in weights):
                raise ValueError(f"data.{field}: each weight must be above 0; leave out what is not wanted")
        if self.modality_weights is not None and self.batches != "modality":
            raise ValueError(
                'data.modality_weights has no effect with data.batches = "mixed"; remove it, or set data.batches = '
                '"modality"'
            )
        if self.modality_weights == {}:
            raise ValueError("data.modality_weights is empty; remove it, or name a modality")
        if unknown := next((name for name in self.modality_weights or {} if name not in MODALITIES), None):
            raise ValueError(f'data.modality_weights: "{unknown}" is no modality; valid: {", ".join(MODALITIES)}')
        return self
