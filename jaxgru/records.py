"""Records that are kept as JSON: structs of msgspec, whose types are checked when they are read."""

from __future__ import annotations

from typing import Annotated, Any

from jaxgru.errors import needs

with needs("train"):
    import msgspec
    from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=-(10**9), le=10**9)] | Annotated[float, Meta(ge=-1e9, le=1e9)]
"""A finite number. An integer stays an integer, so that rewriting a file does not change it."""
Whole = Annotated[int, Meta(ge=0, le=2**53)]
Count = Annotated[int, Meta(ge=1, le=2**53)]


class Record(Struct, frozen=True, omit_defaults=True):
    """Base of all records; unknown fields are ignored, and defaults are not written."""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as it is written in JSON."""
        return msgspec.to_builtins(self)
