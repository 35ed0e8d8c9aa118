"""Ways to spoil bytes, and values that programs trip over."""

from __future__ import annotations

import random
import re
import struct

NUMBERS = (
    0, 1, 2, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip

TEXTS = (
    "", "a", "\0", "\n", "\r\n", "a\nb", "\ufeff", "\u202e\u05d0\u05d1", "\u2028", "\x1b[31m",
    "\x1b]0;title\x07", "..", "../x", "/", "/etc/passwd", "a/b", "~", "$HOME", "%s%n", "{0}",
    "[/bold]", "[red]", "'\"", "\\", "e\u0301", "\U0001f3ad", "\U0010ffff", "\ufffd", "\ue000",
    "\u0345\u0301" * 40, "x" * 300, "nan", "-0", "1e999", "__class__",
)  # fmt: skip


def mutate(rng: random.Random, data: bytes, *, times: int | None = None) -> bytes:
    """The data spoilt once or a few times."""
    for _ in range(times or rng.choice((1, 1, 1, 2, 4, 16))):
        data = rng.choice(WAYS)(rng, data)
    return data


def _place(rng: random.Random, data: bytes) -> int:
    # headers are at either end, and worth most
    n = len(data)
    return min(n, max(0, rng.choice((rng.randint(0, n), rng.randint(0, min(n, 200)),
                                     n - rng.randint(0, min(n, 200))))))  # fmt: skip


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: _place(rng, data)]


def flip(rng: random.Random, data: bytes) -> bytes:
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if spoilt:
            spoilt[min(_place(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def delete(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice((1, 2, 8, 100)) :]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.randbytes(rng.choice((1, 2, 8, 100))) + data[at:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    part = data[at : at + rng.choice((1, 8, 64))]
    return data[:at] + part * rng.choice((2, 3, 50)) + data[at:]


def splice(rng: random.Random, data: bytes) -> bytes:
    at, source = _place(rng, data), _place(rng, data)
    part = data[source : source + rng.choice((4, 32, 256))]
    return data[:at] + part + data[at + rng.choice((0, len(part))) :]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    at, count = _place(rng, data), rng.choice((1, 4, 16, 128))
    return (
        data[:at]
        + rng.choice((b"\0", b"\xff", b" ", b"9", b"[", b'"')) * count
        + (data[at + count :])
    )


def number(rng: random.Random, data: bytes) -> bytes:
    """A little-endian integer in place of some bytes."""
    width = rng.choice("BHIQ")
    mask = 2 ** (8 * struct.calcsize(width)) - 1
    part = struct.pack("<" + width, rng.choice(NUMBERS) & mask)
    at = _place(rng, data)
    return data[:at] + part + data[at + len(part) :]


def digits(rng: random.Random, data: bytes) -> bytes:
    """Another number in place of one that is written in digits."""
    found = list(re.finditer(rb"-?\d+", data))
    if not found:
        return flip(rng, data)
    match = rng.choice(found)
    new = rng.choice((*map(str, NUMBERS), "-1", "1e400", "NaN", "0" * 30, "9" * 5000, "1.5"))
    return data[: match.start()] + new.encode() + data[match.end() :]


WAYS = (truncate, flip, flip, delete, insert, repeat, splice, overwrite, number, digits)


def text(rng: random.Random) -> str:
    """A nasty text, or a random one."""
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    ranges = ((0, 0x80), (0x80, 0x800), (0x590, 0x700), (0x2000, 0x2070), (0x1F300, 0x1F700))
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(12)))
