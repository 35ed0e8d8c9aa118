"""What the tokenizers by SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226) share."""

from __future__ import annotations

import re

from jaxgru.errors import needs
from jaxgru.lm.data.tokenizers.base import Tokenizer

BLOCK = 2**22  # characters that SentencePiece encodes at once, about
SPACE = "▁"  # how SentencePiece writes a space
RESERVED = "▅"  # U+2585, which SentencePiece's trainer keeps for itself


class SentencePieceModel(Tokenizer):
    """A tokenizer whose file is a model of SentencePiece."""

    is_text = False
    is_sized = True

    def __init__(self, model: bytes) -> None:
        with needs("train"):
            from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.pieces = [self._processor.id_to_piece(token) for token in range(self.vocab_size)]
        self._byte_of = {
            token: int(piece[3:5], 16)
            for token, piece in enumerate(self.pieces)
            if self._processor.is_byte(token) and re.fullmatch("<0x[0-9A-F]{2}>", piece)
        }

    @classmethod
    def from_bytes(cls, data: bytes) -> SentencePieceModel:
        """Invert `to_bytes`. Raises ValueError or RuntimeError for other data."""
        if not data:
            raise ValueError("it is empty")  # SentencePiece would accept it, and fail when used
        return cls(data)

    def to_bytes(self) -> bytes:
        """Return the model in SentencePiece's own format."""
        return self._model


def most_pieces(error: Exception) -> int | None:
    """Return how many pieces can be made, if the trainer failed because it was to make more."""
    found = re.search(r"too high .* <= (\d+)", str(error))
    return int(found[1]) if found else None


def why(error: Exception) -> str:
    """Return the trainer's message without the place in SentencePiece's source; it may be empty."""
    return re.sub(r"^INTERNAL: \S+ \[.*\] ?", "", " ".join(str(error).split()))
