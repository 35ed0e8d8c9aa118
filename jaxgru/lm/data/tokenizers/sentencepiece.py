"""The study's subwords, which lose white space; and any model of SentencePiece, as it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from jaxtyping import Int

from jaxgru.errors import needs
from jaxgru.lm.data.tokenizers import sentencepiece_model
from jaxgru.lm.data.tokenizers.base import ANY_TOKEN, Chunk, Start, Tokens, check_utf_8, lacks
from jaxgru.lm.data.tokenizers.sentencepiece_model import RESERVED, SPACE, blocks, cut
from jaxgru.printing import counted

END = r"[ \t\n\r](?=\S)"
"""White space before a word, where SentencePiece begins a new piece in any case.

It takes other white space of Python's for no space, such as U+0085.
"""


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
        # How many characters of the normalised text a piece has. Of the bytes of a character, the
        # first one counts for the whole.
        self._lengths = np.array([len(piece) for piece in self.pieces])
        for token, byte in self._byte_of.items():
            is_continuation = 0x80 <= byte < 0xC0
            self._lengths[token] = not is_continuation

    @classmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> SentencePieceTokenizer:
        """Train as the study does: byte pairs, every character covered, unk 0, bos 1, eos 2.

        Raises:
          TokenizerError: SentencePiece cannot make that many pieces of that text.
        """
        normalize = _normalize_for_training()
        normal_text = "".join(normalize(block) for block in blocks(text, END))
        # The trainer skips lines with its reserved character.
        lines = cut(re.split(f"[\r\n{RESERVED}]", text))
        in_lines = set().union(*map(normalize, lines))
        characters = in_lines | set(normal_text)
        # A cut can part accents from their letter, with which they are another character.
        lines += sorted(characters - in_lines - {RESERVED})
        model = sentencepiece_model.train(
            lines,
            vocab_size,
            required_chars="".join(sorted(characters - {RESERVED, SPACE})),
            user_defined_symbols=sorted(characters & {RESERVED}),
            bos_id=1,
            eos_id=2,
            # The trainer takes the name of a special piece in the text for the end of a word.
            unk_piece=absent("<unk>", normal_text),
            bos_piece=absent("<s>", normal_text),
            eos_piece=absent("</s>", normal_text),
        )
        return cls(model)

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        check_utf_8(text)
        encode = self._processor.encode
        unknown = self._processor.unk_id()
        parts = [np.array(encode(block), np.int32) for block in blocks(text, END)]
        tokens = np.concatenate(parts)
        if (tokens == unknown).any():
            characters = set(self._processor.normalize(text)) - {" ", SPACE}
            others = {character for character in characters if unknown in encode(character)}
            raise lacks(counted(self.vocab_size, "piece"), others)
        return tokens

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text, with single spaces for white space."""
        return self._processor.decode(self.as_list(tokens))

    def continuation(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Decode chunk by chunk; the first bytes of a character wait for its last ones."""
        # Any text will do: at the beginning of one, a space would be lost.
        before = [self._processor.unk_id()]
        start = len(self._processor.decode(before))
        tokens: list[int] = []
        text = ""
        for chunk in chunks:
            tokens += self.as_list(chunk)
            text = self._processor.decode(before + tokens)[start:]
            is_cut = text.endswith("\ufffd")
            if is_cut:
                yield ""
            else:
                yield text
                tokens = []
        if tokens:
            yield text

    def may_follow(self, prompt: str) -> Start:
        """Return the prompt's last character where encoding loses white space at its end."""
        check_utf_8(prompt)
        normalize = self._processor.normalize
        if normalize(prompt) == normalize(prompt + "x")[:-1]:
            return ANY_TOKEN
        mask = np.array([piece.startswith(SPACE) for piece in self.pieces])
        if not mask.any():
            return ANY_TOKEN
        return prompt[-1:], mask

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters these first tokens stand for; a word has the space before."""
        normalize = self._processor.normalize
        # Characters of the normalised text, from the start of a block.
        num_normal = int(self._lengths[self.as_list(tokens)].sum())
        start = 0
        for block in blocks(text, END):
            normal, offsets = normalize(block, with_offsets=True)
            if num_normal < len(normal):
                return start + offsets[num_normal]
            start += len(block)
            num_normal -= len(normal)
        return start


def _normalize_for_training() -> Callable[[str], str]:
    """Return the function that normalises a text as the trainer does by default."""
    with needs("train"):
        from sentencepiece import SentencePieceNormalizer

    normalizer = SentencePieceNormalizer(
        rule_name="nmt_nfkc",
        add_dummy_prefix=True,
        escape_whitespaces=True,
        remove_extra_whitespaces=True,
    )
    return normalizer.normalize


def absent(name: str, text: str) -> str:
    """Return a name that is not in the text."""
    while name in text:
        name = f"<{name}>"
    return name
