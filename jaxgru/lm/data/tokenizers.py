"""Text to tokens and back: characters, or SentencePiece subwords."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxgru.errors import MissingPackage, UserError, a_type, needs
from jaxgru.lm.files import read_bytes, write_bytes

BLOCK = 2**22  # characters that SentencePiece encodes at once, at most
MAX_BYTES = 2**26  # in a tokenizer's file: millions of pieces
SPACE = "▁"  # how SentencePiece writes a space
RESERVED = "▅"  # U+2585, which SentencePiece's trainer keeps for itself

Kind = Literal["characters", "sentencepiece"]
CORPUS_TOKENIZERS: dict[int, Kind] = {65: "characters", 1000: "sentencepiece"}
"""The study's two vocabulary sizes, and the kind of Tiny Shakespeare's tokenizer for each."""
Tokens = Int[np.ndarray, "N"] | Int[Array, "N"]
Chunk = Int[np.ndarray, "_"] | Int[Array, "_"]  # each of another length


class TokenizerError(UserError):
    """A text that cannot be encoded or learned from, or a tokenizer that cannot be read."""


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer does. Tokens are int32."""

    kind: Kind  # config.data.tokenizer
    file_name: str  # in a run folder
    vocab_size: int
    pieces: list[str]  # of each token: what it stands for; no two are alike

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        """Return the text's tokens. Raises TokenizerError for characters not in the vocabulary."""
        ...

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text."""
        ...

    def continuation(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Decode the tokens that continue a text, chunk by chunk.

        Text that the tokens of a later chunk could change is held back until it is settled.
        """
        ...

    def may_follow(self, prompt: str) -> Bool[np.ndarray, "V"] | None:
        """Return which tokens may follow the prompt; None: all.

        Subwords lose a space at the end of the prompt, so a word has to begin after it.
        """
        ...

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters of the text these tokens, the first of its encoding, cover."""
        ...

    def to_bytes(self) -> bytes:
        """Return the tokenizer as the content of a file, for `tokenizer_from_bytes`."""
        ...


class CharacterTokenizer(Tokenizer):
    """One token per character; the vocabulary is the distinct characters, in token order."""

    kind: Kind = "characters"
    file_name = "tokenizer.json"

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.pieces = list(vocabulary)
        self.vocab_size = len(vocabulary)
        self._token_of = {character: token for token, character in enumerate(vocabulary)}

    @classmethod
    def learn(cls, text: str) -> CharacterTokenizer:
        """Return the tokenizer of a text: the sorted set of its characters."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_bytes(cls, data: bytes) -> CharacterTokenizer:
        """Invert `to_bytes`. Raises ValueError for other data."""
        content = json.loads(data)
        vocabulary = content.get("characters") if isinstance(content, dict) else None
        if not isinstance(vocabulary, str) or len(set(vocabulary)) != len(vocabulary):
            raise ValueError("its vocabulary is not a string of distinct characters")
        vocabulary.encode()  # refuse half a surrogate pair, which no file or terminal accepts
        return cls(vocabulary)

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8: {"characters": the vocabulary}."""
        return json.dumps({"characters": self.vocabulary}, ensure_ascii=False).encode()

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        if unknown := set(text) - set(self._token_of):
            raise _lacks(f"{self.vocab_size} characters", unknown)
        return np.fromiter(map(self._token_of.__getitem__, text), np.int32, len(text))

    def decode(self, tokens: Tokens) -> str:
        return "".join(self.vocabulary[token] for token in np.asarray(tokens).tolist())

    def continuation(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        return map(self.decode, chunks)

    def may_follow(self, prompt: str) -> None:
        """Return None: every token may follow any prompt."""

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters of the text its first tokens cover: one per token."""
        return len(tokens)


class SentencePieceTokenizer(Tokenizer):
    """Byte-pair subwords by SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226).

    SentencePiece normalises a text: white space of any length becomes one space, so newlines are
    lost; control characters vanish; compatibility characters are replaced (NFKC), so "ﬁ" is "fi".
    """

    kind: Kind = "sentencepiece"
    file_name = "tokenizer.model"

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
        # of the normalised text; the first byte of a character stands for the whole
        self._lengths = np.array([len(piece) for piece in self.pieces])
        for token, byte in self._byte_of.items():
            self._lengths[token] = not 0x80 <= byte < 0xC0

    @classmethod
    def learn(cls, text: str, vocab_size: int) -> SentencePieceTokenizer:
        """Train as the study does: BPE, every character covered, unk 0, bos 1, eos 2.

        Raises:
          TokenizerError: SentencePiece cannot make that many pieces of that text.
        """
        with needs("train"):
            from sentencepiece import SentencePieceNormalizer, SentencePieceTrainer

        cannot = f"SentencePiece cannot make {vocab_size} pieces of this text"
        if "\0" in text:
            raise TokenizerError(f"{cannot}, which has NUL characters.")
        normalize = SentencePieceNormalizer(
            rule_name="nmt_nfkc",  # as the trainer does by default
            add_dummy_prefix=True,
            escape_whitespaces=True,
            remove_extra_whitespaces=True,
        ).normalize
        normal = "".join(normalize(block) for _, _, block in _blocks(text))
        # The trainer skips lines of more than 4,192 bytes and lines with its reserved character.
        step = 1000
        lines = re.split(f"[\r\n{RESERVED}]", text)
        lines = [line[i : i + step] for line in lines for i in range(0, len(line), step)]
        seen = set().union(*map(normalize, lines))
        characters = seen | set(normal)
        # accents that a cut parts from their letter
        lines += sorted(characters - seen - {RESERVED})
        if not normal.strip(SPACE + RESERVED):
            raise TokenizerError(f"{cannot}, which has no words.")
        if vocab_size < (least := len(characters) + 3):
            raise TokenizerError(
                f"{cannot}: its {len(characters):,} characters and 3 special pieces alone are "
                f"{least}; set model.vocab_size to that or more."
            )
        # The trainer takes the name of a special piece in the text for the end of a word.
        unk, bos, eos = (_absent(name, normal) for name in ("<unk>", "<s>", "</s>"))
        model = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                # Rounded to float32, a coverage without the rarest characters of a long text is 1,
                # unless they are required and one that is frequent is not.
                character_coverage=1.0,
                required_chars="".join(sorted(characters - {RESERVED, SPACE})),
                user_defined_symbols=sorted(characters & {RESERVED}),
                unk_id=0,
                bos_id=1,
                eos_id=2,
                unk_piece=unk,
                bos_piece=bos,
                eos_piece=eos,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            if most := re.search(r"too high .* <= (\d+)", str(error)):
                raise TokenizerError(
                    f"{cannot}, only {most[1]}; set model.vocab_size to that or less, or use a "
                    "longer text."
                ) from error
            # the message begins with a place in SentencePiece's source
            reason = re.sub(r"^INTERNAL: \S+ \[.*\] ?", "", " ".join(str(error).split()))
            raise TokenizerError(f"{cannot}: {reason or 'it does not say why.'}") from error
        return cls(model.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes) -> SentencePieceTokenizer:
        """Invert `to_bytes`. Raises ValueError or RuntimeError for other data."""
        if not data:
            raise ValueError("it is empty")  # SentencePiece would accept it, and fail when used
        return cls(data)

    def to_bytes(self) -> bytes:
        """Return the model in SentencePiece's own format."""
        return self._model

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        unknown = {c for c in set(text) if "\ud800" <= c <= "\udfff"}  # C++ cannot take them
        if not unknown:
            encode, unk = self._processor.encode, self._processor.unk_id()
            parts = []
            for _, before, block in _blocks(text):
                tokens = np.array(encode(before + block)[len(encode(before)) :], np.int32)
                parts.append(tokens)
                # an unknown `before` and an unknown character after it are one token
                if unk in tokens or (before and unk in encode(block[0])):
                    normal = set(self._processor.normalize(block)) - {" ", SPACE}
                    unknown |= {c for c in normal if unk in encode(c)}
            tokens = np.concatenate(parts)
            if (tokens != unk).all() and not unknown:
                return tokens
        raise _lacks(f"{self.vocab_size} pieces", unknown)

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text, with single spaces for white space."""
        return self._processor.decode(np.asarray(tokens).tolist())

    def continuation(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Decode the tokens that continue a text, chunk by chunk.

        The first bytes of a character wait for its last ones, where a piece can be a single byte.
        """
        before = [self._processor.unk_id()]  # any text: at the beginning, a space would be lost
        start = len(self._processor.decode(before))
        held: list[int] = []
        for chunk in chunks:
            tokens = held + np.asarray(chunk).tolist()
            settled = len(tokens) - self._unfinished(tokens)
            held = tokens[settled:]
            yield self._processor.decode(before + tokens[:settled])[start:]
        if held:
            yield self._processor.decode(before + held)[start:]

    def _unfinished(self, tokens: list[int]) -> int:
        """Return how many tokens at the end are the first bytes of a longer character."""
        last = tokens[-3:]
        while not self._byte_of.keys() >= set(last):
            last = last[1:]
        last = bytes(self._byte_of[token] for token in last)
        return len(last) - codecs.utf_8_decode(last, "replace", False)[1]

    def may_follow(self, prompt: str) -> Bool[np.ndarray, "V"] | None:
        """Return which tokens begin with a space where encoding loses one at the prompt's end."""
        normalize = self._processor.normalize
        if normalize(prompt) == normalize(prompt + "x")[:-1]:
            return None
        begin = np.array([piece.startswith(SPACE) for piece in self.pieces])
        return begin if begin.any() else None

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters of the text its first tokens cover.

        White space between words belongs to the token after it.
        """
        normalize = self._processor.normalize
        left = int(self._lengths[np.asarray(tokens)].sum())  # of the normalised text
        for start, before, block in _blocks(text):
            skipped = len(normalize(before))
            length = len(normalize(before + block)) - skipped
            if left < length:
                at = normalize(before + block, with_offsets=True)[1][skipped + left]
                return start + max(at - len(before), 0)
            left -= length
        return len(text)


def _lacks(vocabulary: str, characters: set[str]) -> TokenizerError:
    names = [repr(c) for c in sorted(characters)] or ["characters of the text"]
    more = ", …" if len(names) > 10 else ""
    return TokenizerError(f"the vocabulary of {vocabulary} lacks {', '.join(names[:10])}{more}.")


def _absent(name: str, text: str) -> str:
    """Return a name that is not in the text."""
    while name in text:
        name = f"<{name}>"
    return name


def _blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Cut a text in front of words, where SentencePiece begins a new piece in any case.

    Encoding needs 45 bytes per character, so a long text is not encoded at once. A longer word is
    cut, too, which may cut a piece in two.

    Yields (start, before, block): the block, where it begins in the text, and what to encode before
    it so that a block that begins inside a word does not get the space that begins a text.
    """
    start, before = 0, ""
    while len(text) - start > BLOCK:
        # SentencePiece takes other white space of Python's for no space, such as U+0085
        cut = re.compile(r"[ \t\n\r](?=\S)").search(text, start + BLOCK // 2, start + BLOCK)
        end = cut.end() if cut else start + BLOCK
        yield start, before, text[start:end]
        start, before = end, "" if cut else RESERVED
    yield start, before, text[start:]


def learn_tokenizer(kind: str, text: str, vocab_size: int) -> Tokenizer:
    """Learn a tokenizer of a text; kind is config.data.tokenizer, vocab_size for sentencepiece."""
    if kind == "characters":
        return CharacterTokenizer.learn(text)
    return SentencePieceTokenizer.learn(text, vocab_size)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer into a run folder.

    Raises:
      TokenizerError: as `saved_bytes`.
      OSError: the folder cannot be written.
    """
    data = saved_bytes(tokenizer)
    write_bytes(folder / tokenizer.file_name, data)


def saved_bytes(tokenizer: Tokenizer) -> bytes:
    """Return what `tokenizer_from_bytes` makes the same tokenizer of.

    Raises:
      TokenizerError: it would make none of it, or one of another class.
    """
    if type(tokenizer) not in TOKENIZERS:
        known = " or ".join(cls.__name__ for cls in TOKENIZERS)
        raise TokenizerError(
            f"the tokenizer is {a_type(tokenizer)}, which could not be loaded again; it "
            f"must be a {known}."
        )
    try:
        data = tokenizer.to_bytes()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the {tokenizer.kind} tokenizer is broken: {error}.") from error
    tokenizer_from_bytes(tokenizer.kind, data)
    return data


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that `save_tokenizer` wrote into the folder.

    Raises:
      TokenizerError: there is none, or it cannot be read.
    """
    for cls in TOKENIZERS:
        if (folder / cls.file_name).is_file():
            return read_tokenizer(folder / cls.file_name)
    raise TokenizerError(f"{folder} has no tokenizer.json or tokenizer.model.")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file, .json (characters) or .model (SentencePiece).

    Raises:
      TokenizerError: it cannot be read.
    """
    kinds = {Path(cls.file_name).suffix: cls.kind for cls in TOKENIZERS}
    kind = kinds.get(path.suffix, SentencePieceTokenizer.kind)
    try:
        return tokenizer_from_bytes(kind, read_bytes(path, at_most=MAX_BYTES))
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from error
    except TokenizerError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def tokenizer_from_bytes(kind: str, data: bytes) -> Tokenizer:
    """Return the tokenizer of a kind whose `to_bytes` gave the data.

    Raises:
      TokenizerError: the kind is unknown, or the data is not one.
      MissingPackage: SentencePiece is needed and not installed.
    """
    cls = {cls.kind: cls for cls in TOKENIZERS}.get(kind)
    if cls is None:
        raise TokenizerError(f"there is no kind of tokenizer {kind!r}.")
    try:
        return cls.from_bytes(data)
    except MissingPackage:
        raise
    except (ValueError, RuntimeError) as error:
        raise TokenizerError(f"the {kind} tokenizer is broken: {error}.") from error


TOKENIZERS = (CharacterTokenizer, SentencePieceTokenizer)
