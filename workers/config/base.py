"""What all settings have in common: the base class and the types of single fields."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PromptFormat = Literal["chat", "raw"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Settings(BaseModel):
    """Base of all settings: immutable, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
