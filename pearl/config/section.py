"""The one base of all configuration models: frozen, and an unknown key is an error.

Every field has its meaning and unit in the string below it; `docs/configuration.md` is generated from them.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
