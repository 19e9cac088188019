"""What the sections of the settings have in common.

`config` declares those of the server, `config_models` those of models and lanes.
"""

from __future__ import annotations

import msgspec
from msgspec import Meta

MIB = 1 << 20

Positive = Meta(ge=1)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of settings; a key that it does not declare is an error."""
