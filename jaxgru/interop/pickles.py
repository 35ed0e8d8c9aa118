"""Whether a pickle is only what `torch.save` writes of a checkpoint; told without unpickling it.

`torch.load(weights_only=True)` runs no code, but a pickle of 200 bytes can still have it allocate
any amount (`bytearray(10**10)`), or hash for ever a tuple that holds another one twice, which
holds another one twice, … This looks at the operations (PEP 3154, the standard library's
`pickletools`), of which such a file needs a few.
"""

from __future__ import annotations

import pickletools
import re

MAX_BYTES = 2**17
"""Of the pickle, which names the tensors but does not hold them: some 120 bytes for each."""

MAX_TUPLES = 1000
"""How many tuples one tuple may hold, counted as often as it holds them. A tensor's call has 5."""

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
    """Raises ValueError or IndexError where it is damaged or does more than tensors need."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"a pickle of {len(data)} bytes")
    # The unpickler's stack, and what it remembers by number: of each thing how many tuples it is.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name not in _OPERATIONS:
            raise ValueError(f"the operation {name}")
        if name == "GLOBAL" and not _TENSOR_PARTS.fullmatch(argument):
            raise ValueError(f"the name {argument}")
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(argument, 0))
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
