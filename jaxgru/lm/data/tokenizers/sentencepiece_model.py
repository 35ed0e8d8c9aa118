"""What the tokenizers by SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226) share."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxgru.errors import needs
from jaxgru.lm.data.tokenizers.base import Tokenizer, TokenizerError
from jaxgru.printing import counted

LINE = 1000
"""Characters of a line for the trainer, which skips lines of more than 4,192 bytes."""

BLOCK = 2**22
"""Characters that SentencePiece encodes at once, or a few more."""

SPACE = "▁"
"""How SentencePiece writes a space."""

RESERVED = "▅"
"""U+2585, which SentencePiece's trainer keeps for itself."""


class SentencePieceModel(Tokenizer):
    """A tokenizer whose file is a model of SentencePiece."""

    is_text = False
    is_sized = True

    def __init__(self, model: bytes) -> None:
        with needs("train"):
            from sentencepiece import SentencePieceProcessor

        # SentencePiece would accept it, and fail when used.
        if not model:
            raise ValueError("it is empty")
        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.pieces = [self._processor.id_to_piece(token) for token in range(self.vocab_size)]
        self._byte_of = {
            token: int(piece[3:5], 16)
            for token, piece in enumerate(self.pieces)
            if self._processor.is_byte(token) and re.fullmatch("<0x[0-9A-F]{2}>", piece)
        }

    @property
    def unwritten(self) -> int:
        """SentencePiece's unknown piece, which stands for no text that can be encoded."""
        return self._processor.unk_id()

    @classmethod
    def from_bytes(cls, data: bytes) -> SentencePieceModel:
        return cls(data)

    def to_bytes(self) -> bytes:
        """Return the model in SentencePiece's own format."""
        return self._model


def blocks(text: str, end: str) -> Iterator[str]:
    """Cut a text after matches of `end`, a pattern of where no piece goes on.

    Encoding needs 45 bytes per character, so a long text is not encoded at once.
    """
    ends = re.compile(end)
    start = 0
    while match := ends.search(text, start + BLOCK):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def cut(lines: Iterable[str]) -> list[str]:
    """Cut lines into such of at most LINE characters."""
    return [line[i : i + LINE] for line in lines for i in range(0, len(line), LINE)]


class TooManyPieces(TokenizerError):
    """A text has too few different pieces; the trainer can make `most` of them."""

    def __init__(self, cannot: str, most: int) -> None:
        super().__init__(
            f"{cannot}, only {most}; set model.vocab_size to that or less, or use a longer text."
        )
        self.most = most


def train(lines: Iterable[str], vocab_size: int, **options: Any) -> bytes:
    """Learn byte pairs of lines of text; return a model in SentencePiece's own format.

    Raises:
      TooManyPieces: the text has fewer different pieces.
      TokenizerError: SentencePiece cannot learn from the text for another reason.
    """
    with needs("train"):
        from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            # Required characters are covered first, then the others, the most frequent first, until
            # the share that is covered is 1 in float32. In a long text it is without the rarest, so
            # these must be required, and one that is frequent must not be.
            character_coverage=1.0,
            unk_id=0,
            minloglevel=2,
            **options,
        )
    except (RuntimeError, OSError) as error:
        cannot = f"SentencePiece cannot make {counted(vocab_size, 'piece')} of this text"
        limit = re.search(r"too high .* <= (\d+)", str(error))
        if limit is not None:
            raise TooManyPieces(cannot, int(limit[1])) from error
        message = " ".join(str(error).split())
        why = re.sub(r"^INTERNAL: \S+ \[.*\] ?", "", message)
        raise TokenizerError(f"{cannot}: {why or 'it does not say why.'}") from error
    return model.getvalue()
