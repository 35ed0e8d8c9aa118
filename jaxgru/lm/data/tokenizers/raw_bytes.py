"""One token per byte, of any file."""

from __future__ import annotations

import json

import numpy as np
from jaxtyping import Int

from jaxgru.lm.data.tokenizers.base import ByteLevelTokenizer, TokenizerError


class ByteTokenizer(ByteLevelTokenizer):
    """The bytes of a text in UTF-8, or of a file that is no text at all: token 65 is byte 65.

    What is not UTF-8 in a file is read with Python's `surrogateescape`. It is decoded as U+FFFD, so
    that text can always be printed; `np.uint8(tokens).tobytes()` returns the bytes.
    """

    kind = "bytes"
    file_name = "bytes.json"
    about = "256 tokens, for any file"
    reads_bytes = True
    vocab_size = 256

    def __init__(self) -> None:
        self.bytes_of = [bytes([byte]) for byte in range(256)]
        self.pieces = [_piece(byte) for byte in range(256)]

    @classmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> ByteTokenizer:
        """Return the tokenizer, which is the same for every text."""
        return cls()

    @classmethod
    def from_bytes(cls, data: bytes) -> ByteTokenizer:
        if json.loads(data) != {"bytes": 256}:
            raise ValueError("it is not that of bytes")
        return cls()

    def to_bytes(self) -> bytes:
        """Return JSON: {"bytes": 256}."""
        return b'{"bytes": 256}'

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        try:
            data = text.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not UTF-8: {error.reason}.") from error
        return np.frombuffer(data, np.uint8).astype(np.int32)


def _piece(byte: int) -> str:
    """Return a byte as its character in ASCII if that can be printed, or else as its number."""
    character = chr(byte)
    if character.isascii() and character.isprintable():
        return character
    return f"<0x{byte:02X}>"
