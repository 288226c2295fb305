"""What every section of a recipe inherits."""

from pydantic import BaseModel, ConfigDict


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
