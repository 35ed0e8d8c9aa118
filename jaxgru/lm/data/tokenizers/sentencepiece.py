"""The study's subwords, which lose white space; and any model of SentencePiece, as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int

from jaxgru.errors import needs
from jaxgru.lm.data.tokenizers import sentencepiece_model
from jaxgru.lm.data.tokenizers.base import Chunk, Start, Tokens, check_utf_8, lacks
from jaxgru.lm.data.tokenizers.sentencepiece_model import LINE, RESERVED, SPACE, blocks
from jaxgru.printing import counted

# Of white space, in front of a word, where SentencePiece begins a new piece in any case. It takes
# other white space of Python's for no space, such as U+0085.
END = r"[ \t\n\r](?=\S)"


class SentencePieceTokenizer(sentencepiece_model.SentencePieceModel):
    """Byte-pair subwords.

    SentencePiece normalises a text: white space of any length becomes one space, so newlines are
    lost; control characters vanish; compatibility characters are replaced (NFKC), so "ﬁ" is "fi".
    """

    kind = "sentencepiece"
    file_name = "tokenizer.model"
    about = "the study's subwords, which lose line breaks and repeated spaces"

    def __init__(self, model: bytes) -> None:
        super().__init__(model)
        # of the normalised text; the first byte of a character stands for the whole
        self._lengths = np.array([len(piece) for piece in self.pieces])
        for token, byte in self._byte_of.items():
            self._lengths[token] = not 0x80 <= byte < 0xC0

    @classmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> SentencePieceTokenizer:
        """Train as the study does: byte pairs, every character covered, unk 0, bos 1, eos 2.

        Raises TokenizerError if SentencePiece cannot make that many pieces of that text.
        """
        with needs("train"):
            from sentencepiece import SentencePieceNormalizer

        normalize = SentencePieceNormalizer(  # as the trainer does by default
            rule_name="nmt_nfkc", add_dummy_prefix=True, escape_whitespaces=True,
            remove_extra_whitespaces=True,
        ).normalize  # fmt: skip
        normal = "".join(normalize(block) for block in blocks(text, END))
        # The trainer skips lines with its reserved character.
        lines = re.split(f"[\r\n{RESERVED}]", text)
        lines = [line[i : i + LINE] for line in lines for i in range(0, len(line), LINE)]
        seen = set().union(*map(normalize, lines))
        characters = seen | set(normal)
        # accents that a cut parts from their letter
        lines += sorted(characters - seen - {RESERVED})
        # The trainer takes the name of a special piece in the text for the end of a word.
        unk, bos, eos = (absent(name, normal) for name in ("<unk>", "<s>", "</s>"))
        model = sentencepiece_model.train(
            lines, vocab_size, required_chars="".join(sorted(characters - {RESERVED, SPACE})),
            user_defined_symbols=sorted(characters & {RESERVED}),
            bos_id=1, eos_id=2, unk_piece=unk, bos_piece=bos, eos_piece=eos,
        )  # fmt: skip
        return cls(model)

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        check_utf_8(text)
        encode, unk = self._processor.encode, self._processor.unk_id()
        tokens = np.concatenate([np.array(encode(b), np.int32) for b in blocks(text, END)])
        if (tokens == unk).any():
            normal = set(self._processor.normalize(text)) - {" ", SPACE}
            raise lacks(counted(self.vocab_size, "piece"), {c for c in normal if unk in encode(c)})
        return tokens

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text, with single spaces for white space."""
        return self._processor.decode(self.as_list(tokens))

    def continuation(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Decode chunk by chunk; the first bytes of a character wait for its last ones."""
        before = [self._processor.unk_id()]  # any text: at the beginning, a space would be lost
        start, held, text = len(self._processor.decode(before)), [], ""
        for chunk in chunks:
            held += self.as_list(chunk)
            text = self._processor.decode(before + held)[start:]
            waits = text.endswith("\ufffd")
            yield "" if waits else text
            held = held if waits else []
        if held:
            yield text

    def may_follow(self, prompt: str) -> Start:
        """Return the prompt's last character where encoding loses white space at its end."""
        check_utf_8(prompt)
        normalize = self._processor.normalize
        if normalize(prompt) == normalize(prompt + "x")[:-1]:
            return "", None
        begin = np.array([piece.startswith(SPACE) for piece in self.pieces])
        return (prompt[-1:], begin) if begin.any() else ("", None)

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters these first tokens stand for; a word has the space before."""
        normalize = self._processor.normalize
        left = int(self._lengths[self.as_list(tokens)].sum())  # of the normalised text
        start = 0
        for block in blocks(text, END):
            normal, offsets = normalize(block, with_offsets=True)
            if left < len(normal):
                return start + offsets[left]
            start, left = start + len(block), left - len(normal)
        return start


def absent(name: str, text: str) -> str:
    """Return a name that is not in the text."""
    while name in text:
        name = f"<{name}>"
    return name
