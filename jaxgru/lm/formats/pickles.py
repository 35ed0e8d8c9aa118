"""Check, without unpickling it, that a pickle is only what `torch.save` writes for a checkpoint.

`torch.load(weights_only=True)` runs no code, but a pickle of 200 bytes can still make it allocate
any amount of memory (`bytearray(10**10)`), or hash for ever a tuple that holds a tuple twice, which
holds a tuple twice, and so on. This reads the operations (PEP 3154, the standard library's
`pickletools`), of which a checkpoint needs only a few kinds.
"""

from __future__ import annotations

import pickletools
import re

MAX_BYTES = 2**17
"""The largest pickle accepted. It names the tensors, in about 120 bytes each, not their data."""

MAX_TUPLES = 1000
"""Tuples that one tuple may hold, repeated ones counted each time. A tensor's call holds 5."""

_OPERATIONS = set(
    "PROTO STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS"
    " APPEND APPENDS BINUNICODE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT NEWTRUE NEWFALSE NONE"
    " GLOBAL REDUCE BUILD BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET".split()
)
_TENSOR_PARTS = re.compile(
    r"torch\._utils _rebuild_(tensor_v2|parameter|sparse_tensor|meta_tensor_no_storage)"
    r"|torch\.serialization _get_layout|torch (\w+Storage|[a-z]+\d+|Size)|collections OrderedDict"
)


def check_pickle(data: bytes) -> None:
    """Raise ValueError or IndexError if the pickle is damaged or does more than tensors need."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"a pickle of {len(data)} bytes")
    # The unpickler's stack and memo, each object represented by the number of tuples in it.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name not in _OPERATIONS:
            raise ValueError(f"the operation {name}")
        if name == "GLOBAL" and not _TENSOR_PARTS.fullmatch(str(argument)):
            raise ValueError(f"the name {argument}")
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(int(argument or 0), 0))
        elif name in ("TUPLE", "SETITEMS", "APPENDS"):
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            if name == "TUPLE":
                stack.append(1 + sum(items))
        else:
            taken = len(operation.stack_before)
            items = [stack.pop() for _ in range(taken)]
            tuples = 1 + sum(items) if "TUPLE" in name or name == "REDUCE" else 0
            stack += [tuples] * len(operation.stack_after)
        if stack and stack[-1] > MAX_TUPLES:
            raise ValueError("tuples in tuples")
