"""What every section of a recipe inherits."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_serializer, model_validator


class Section(BaseModel):
    """A table of the recipe. Unknown keys are errors; field docstrings become help and docs."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    table: ClassVar[str] = ""
    """The table's dotted name, for a class with `unused` fields."""

    def unused(self) -> dict[str, str]:
        """Fields that have no effect beside the values of others, each with the setting that makes it so."""
        return {}

    @model_validator(mode="after")
    def _no_unused(self):
        for name, why in self.unused().items():
            if name in self.model_fields_set and getattr(self, name) is not None:
                raise ValueError(f"{self.table}.{name} has no effect with {why}; remove it")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, handler):
        data = handler(self)
        for name in self.unused():
            data.pop(name, None)
        return data
