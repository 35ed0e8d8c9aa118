"""SentencePiece models: spoilt, and protobuf messages that are whole but make no sense."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
from fuzzing import Finding, Made
from mutations import NUMBERS, mutate, text

from jaxgru.lm.data.tokenizers import SentencePieceTokenizer, TokenizerError, read_tokenizer

VALID: list[bytes] = []
SENTENCES = ("to be or not to be", "", " ", "é\0\u202e", "zq\n\nto  be", "be" * 200)


def learn_pieces() -> SentencePieceTokenizer:
    return SentencePieceTokenizer.learn("to be or not to be that is the question\n" * 9, 30)


def prepare(folder: Path) -> None:
    VALID[:] = [learn_pieces().to_bytes()]


def make(rng: random.Random, folder: Path) -> Made:
    data = spoil(rng, VALID[0])
    (folder / "input").write_bytes(data)
    path = folder / "input.model"
    path.write_bytes(data)
    return Made(path, len(data))


def load(path: Path) -> None:
    use(read_tokenizer(path))


def use(tokenizer) -> None:
    """What the library does with a tokenizer; a text may be refused, a token of its own not."""
    for sentence in SENTENCES:
        try:
            tokens = tokenizer.encode(sentence)
        except TokenizerError:
            continue
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
            raise Finding("tokens outside the vocabulary")
        tokenizer.decode(tokens).encode()
        if not 0 <= tokenizer.num_characters(tokens, sentence) <= len(sentence):
            raise Finding("more characters than the text has")
        "".join(tokenizer.continuation([tokens[:1], tokens[1:]])).encode()
        tokenizer.may_follow(sentence)
    for token in (*range(min(tokenizer.vocab_size, 40)), tokenizer.vocab_size - 1):
        tokenizer.decode(np.array([token])).encode()
    tokenizer.decode(np.arange(min(tokenizer.vocab_size, 2000)))


# ---- protobuf: a message is fields, each (number, wire type, value)


def varint(value: int) -> bytes:
    data = b""
    value %= 2**64
    while value > 127:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def parse(data: bytes) -> list[tuple[int, int, object]]:
    fields, at = [], 0
    while at < len(data):
        key, at = read_varint(data, at)
        match key & 7:
            case 0:
                value, at = read_varint(data, at)
            case 5:
                value, at = data[at : at + 4], at + 4
            case 1:
                value, at = data[at : at + 8], at + 8
            case _:
                length, at = read_varint(data, at)
                value, at = data[at : at + length], at + length
        fields.append((key >> 3, key & 7, value))
    return fields


def build(fields: list[tuple[int, int, object]]) -> bytes:
    parts = []
    for number, wire, value in fields:
        parts.append(varint(number << 3 | wire))
        if wire == 0:
            parts.append(varint(value))
        elif wire in (1, 5):
            parts.append(value)
        else:
            parts += [varint(len(value)), value]
    return b"".join(parts)


def piece(text: bytes, score: float = -1.0, kind: int = 1) -> tuple[int, int, bytes]:
    body = [(1, 2, text), (2, 5, struct.pack("<f", score)), (3, 0, kind)]
    return 1, 2, build(body)


def spoil(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return mutate(rng, data)
    fields = parse(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        fields = _change(rng, fields)
    return build(fields)


def _change(rng: random.Random, fields: list) -> list:
    pieces = [i for i, field in enumerate(fields) if field[0] == 1] or [0]
    specs = [i for i, field in enumerate(fields) if field[0] in (2, 3, 5)]
    fields = list(fields) or [piece(b"a")]
    at = min(rng.choice(pieces), len(fields) - 1)
    score = rng.choice((0.0, -1.0, 1e38, -1e38, float("nan"), float("inf"), float("-inf"), 1e-45))
    nasty = rng.choice((
        b"", b"a", b"\0", b"\xff", b"\xed\xa0\x80", "▁".encode(), "▁to".encode(), b"<unk>", b"<s>",
        b"<0x41>", b"<0xZZ>", b"\xe2\x96", b"x" * 10_000, text(rng).encode(), b" ", b"\n",
    ))  # fmt: skip
    match rng.randrange(11):
        case 0:
            fields[at] = piece(nasty, score, rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 2**31, 2**64 - 1)))
        case 1:
            fields.insert(at, fields[at])  # the same piece twice
        case 2:
            fields.pop(at)
        case 3:
            kind = rng.choice((1, 1, 4, 6))
            count = rng.choice((10, 1000, 20_000))
            fields += [piece(b"p%d" % i, -float(i), kind) for i in range(count)]
        case 4:
            fields += [piece(nasty, score, rng.choice((1, 2, 3, 4, 5, 6)))] * rng.choice(
                (1, 2, 300)
            )
        case 5 | 6 | 7 if specs:
            spec = rng.choice(specs)
            number, wire, body = fields[spec]
            fields[spec] = number, wire, _change_spec(rng, number, body)
        case 8:
            fields = [field for field in fields if field[0] != 1]
        case 9:
            fields.append((4, 2, _self_test(rng)))
        case _:
            rng.shuffle(fields)
    return fields


def _change_spec(rng: random.Random, number: int, body: bytes) -> bytes:
    """A field of trainer_spec (2), normalizer_spec (3) or denormalizer_spec (5)."""
    try:
        inner = parse(body)
    except IndexError:
        return mutate(rng, body)
    match rng.randrange(5):
        case 0:
            return mutate(rng, body)
        case 1:  # trainer_spec.model_type 3: 1 unigram, 2 BPE, 3 word, 4 char; byte_fallback 35
            return build([*inner, (3, 0, rng.choice((0, 1, 2, 3, 4, 5, 2**31))), (35, 0, 1)])
        case 2 if number != 2:  # precompiled_charsmap 2: a trie's length, the trie, texts
            old = next((v for n, w, v in inner if n == 2 and w == 2), b"")
            size = rng.choice((0, 4, 8, 1024, len(old), *NUMBERS)) % 2**32
            chars = rng.choice((
                mutate(rng, old) if old else rng.randbytes(40),
                struct.pack("<I", size) + old[4:],
                struct.pack("<I", 1024) + rng.randbytes(1024) + rng.randbytes(20),
                struct.pack("<I", 4) + rng.randbytes(4) + b"a\0",
                rng.randbytes(rng.choice((1, 3, 4, 5, 100))),
                old[:-1],
            ))  # fmt: skip
            return build([*[f for f in inner if f[0] != 2], (2, 2, chars)])
        case 3:
            field = rng.choice((3, 4, 5, 24, 26, 40, 41, 42, 43, 44, 45, 46, 47, 48))
            if field in (44, 45, 46, 47, 48):
                return build([*inner, (field, 2, text(rng).encode())])
            return build([*inner, (field, 0, rng.choice(NUMBERS))])
        case _:
            if inner:
                i = rng.randrange(len(inner))
                n, wire, value = inner[i]
                if wire == 0:
                    value = rng.choice(NUMBERS)
                elif isinstance(value, bytes) and wire == 2:
                    value = mutate(rng, value)
                inner[i] = n, wire, value
            return build(inner)


def _self_test(rng: random.Random) -> bytes:
    sample = build([(1, 2, text(rng).encode()), (2, 2, text(rng).encode())])
    return build([(1, 2, sample)] * rng.choice((1, 100)))
