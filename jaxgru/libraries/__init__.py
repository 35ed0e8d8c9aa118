"""Layers to and from other libraries: one file each, which imports its library.

Each file converts weights both ways. Those of Flax, Equinox and dm-haiku also run the library's own
cells at jaxgru's speed.
"""

from __future__ import annotations

from jaxgru.errors import LibraryError

__all__ = ["LibraryError"]
