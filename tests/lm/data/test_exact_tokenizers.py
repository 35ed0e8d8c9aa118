"""Subwords and bytes: every text comes back as it was, at once, in chunks, and in its length."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxgru
from jaxgru.lm.data import tokenizers
from jaxgru.lm.data.tokenizers import ByteTokenizer, SubwordTokenizer, TokenizerError

CODE = "def f(x):\n    if x:\n\treturn  {'a': x}  # ▁▅ ﬁ\r\n\r\n\n" * 9
VERSE = "Tyger Tyger, burning bright,\n   In the forests of the night;\n\n" * 9
ABC = "X:1\nT:Speed the Plough\nM:4/4\nK:G\n|:GABc dedB|dedB dedB|c2ec B2dB|c2A2 A2BA|\n" * 9
CHINESE = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。\n" * 9
TEXTS = {"code": CODE, "verse": VERSE, "abc": ABC, "chinese": CHINESE}

odd = st.sampled_from(
    ["▁", "▅", "<unk>", "<0x41>", "<s>", "\n", "\r\n", "   ", "\0", "ﬁ", "\u0301"]
)
texts = st.lists(odd | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)).map("".join)


@pytest.fixture(scope="module")
def learned() -> SubwordTokenizer:
    return SubwordTokenizer.learn(CODE + VERSE, 330)


def check(tokenizer, text: str) -> None:
    """Decoded at once and in chunks, and counted from every token."""
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32 and (tokens < tokenizer.vocab_size).all()
    assert tokenizer.decode(tokens) == text
    for size in (1, 2, 5):
        chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        parts = list(tokenizer.continuation(chunks))
        assert "".join(parts) == text and len(parts) == len(chunks)
    counts = [tokenizer.num_characters(tokens[:n], text) for n in range(len(tokens) + 1)]
    assert counts[0] == 0 and counts[-1] == len(text) and counts == sorted(counts)


@settings(max_examples=30)
@given(texts)
def test_every_text_comes_back_from_subwords_of_another(learned, text):
    check(learned, text)


@given(texts)
def test_every_text_comes_back_from_bytes(text):
    check(ByteTokenizer(), text)
    assert ByteTokenizer().encode(text).tolist() == list(text.encode())


@settings(max_examples=30)
@given(texts, st.sampled_from([259, 262, 300, 10_000]))
def test_every_text_comes_back_from_its_own_subwords(text, vocab_size):
    check(SubwordTokenizer.learn(text, vocab_size), text)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_that_the_studys_subwords_lose(text):
    tokenizer = SubwordTokenizer.learn(text, 400)
    check(tokenizer, text)
    assert len(tokenizer.encode(text)) < len(text) / 1.3
    study = tokenizers.SentencePieceTokenizer.learn(text, 50)
    assert study.decode(study.encode(text)) != text


def test_the_packages_own_sources():
    """Also across the blocks in which a long text is encoded."""
    files = sorted(Path(jaxgru.__file__).parent.rglob("*.py"))
    text = "".join(file.read_text() for file in files)
    tokenizer = SubwordTokenizer.learn(text[:200_000], 1000)
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size == 1000 and len(tokens) < len(text) / 2
    assert tokenizer.decode(tokens) == text
    assert tokenizer.num_characters(tokens, text) == len(text)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_characters_are_counted_as_sentencepiece_counts_them(text):
    """By its own account of what each piece stands for, which newer versions call a proto."""
    text = text.replace("▁", "")
    tokenizer = SubwordTokenizer.learn(text, 320)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.to_bytes())
    try:
        proto = theirs.encode(text, return_type="proto")
    except TypeError:
        proto = theirs.encode(text, out_type="immutable_proto")
    ends = np.cumsum([0, *(len(piece.surface) for piece in proto.pieces)])
    tokens = tokenizer.encode(text)
    assert [piece.id for piece in proto.pieces] == tokens.tolist()
    whole = [i for i, t in enumerate(tokens) if not theirs.is_byte(int(t))]
    assert len(whole) > 50
    for i in whole:
        assert tokenizer.num_characters(tokens[:i], text) == ends[i]
        assert tokenizer.num_characters(tokens[: i + 1], text) == ends[i + 1]


@pytest.mark.parametrize("block", [1, 7, 40])
def test_a_long_text_is_encoded_in_blocks_as_it_is_at_once(learned, monkeypatch, block):
    """A cut after a line break or before a space changes no token."""
    text = CODE.replace("▁", "") + VERSE
    whole = learned.encode(text)
    monkeypatch.setattr(tokenizers.sentencepiece_model, "BLOCK", block)
    assert learned.decode(learned.encode(text)) == text
    if block == 40:
        np.testing.assert_array_equal(learned.encode(text), whole)


def test_a_line_break_is_a_token_and_spaces_belong_to_words(learned):
    pieces = [learned.pieces[t] for t in learned.encode("Tyger,\n\n    In the")]
    assert pieces == ["Tyger", ",", "\n", "\n", "▁▁▁▁", "In", "▁the"]


def test_line_breaks_of_windows_are_a_token():
    tokenizer = SubwordTokenizer.learn(VERSE.replace("\n", "\r\n"), 300)
    pieces = [tokenizer.pieces[t] for t in tokenizer.encode("night;\r\n\r\n\rTyger")]
    assert pieces.count("\r\n") == 2 and pieces.count("\r") == 1


def test_a_vocabulary_that_a_text_is_too_short_for_is_lowered():
    tokenizer = SubwordTokenizer.learn("to be or not to be", 1000)
    assert 259 < tokenizer.vocab_size < 300
    assert SubwordTokenizer.learn("", 1000).vocab_size == 259
    assert SubwordTokenizer.learn(VERSE, 300).vocab_size == 300
    with pytest.raises(TokenizerError, match="of 65 is too small .* need 259; set"):
        SubwordTokenizer.learn(VERSE, 65)


def test_rare_characters_are_bytes_and_frequent_ones_are_not():
    pieces = SubwordTokenizer.learn("ab " * 3000 + "é", 300).pieces
    assert {"a", "b", "▁"} <= {piece for piece in pieces if len(piece) == 1}
    assert "é" not in pieces


@pytest.mark.parametrize("text", ["abc" * 1000, "abc" * 1000 + " ", " " * 1000 + "a", "a b " * 99])
def test_spaces_and_characters_have_tokens_however_rare_they_are(text, monkeypatch):
    """Less than 98 % is all of a text here; in float32, all but 1 of 33.5 million characters is."""
    train = sentencepiece.SentencePieceTrainer.train

    def rounded(**options):
        return train(**options | {"character_coverage": 0.98})

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", rounded)
    pieces = SubwordTokenizer.learn(text, 300).pieces
    assert {"▁", *text.replace(" ", "▁")} <= set(pieces)


@pytest.mark.parametrize("prompt, end", [
    ("forests of ", " "), ("burning   ", " "), ("if x:\n    ", ""), ("forests of", ""),
    ("of\n", ""), (" ", ""), ("", ""),
])  # fmt: skip
def test_spaces_at_the_end_of_a_prompt_belong_to_the_next_word(learned, prompt, end):
    found, mask = learned.may_follow(prompt)
    assert found == end
    if end:
        begin = [learned.decode(np.array([t])).startswith(end) for t in range(learned.vocab_size)]
        np.testing.assert_array_equal(mask, begin)
        assert mask.sum() > 1
    else:
        assert mask is None


def test_a_model_that_loses_something_is_no_subwords_but_sentencepiece(tmp_path):
    study = tokenizers.SentencePieceTokenizer.learn(VERSE, 60)
    with pytest.raises(TokenizerError, match="does not have a piece for each byte"):
        tokenizers.tokenizer_from_bytes("subwords", study.to_bytes())
    (tmp_path / "x.model").write_bytes(study.to_bytes())
    assert tokenizers.read_tokenizer(tmp_path / "x.model").kind == "sentencepiece"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_anothers_model_that_loses_nothing_is_subwords(tmp_path, kind):
    model = model_with_bytes(
        model_type=kind, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, user_defined_symbols=["\n\n", "<|end|>"],
    )  # fmt: skip
    (tmp_path / "x.model").write_bytes(model)
    tokenizer = tokenizers.read_tokenizer(tmp_path / "x.model")
    assert isinstance(tokenizer, SubwordTokenizer)
    for text in (*TEXTS.values(), "x  y<|end|>\n\n x"):
        check(tokenizer, text)


@pytest.mark.parametrize("rule, prefix", [("nmt_nfkc", False), ("identity", True)])
def test_a_model_with_bytes_that_loses_something_is_refused(rule, prefix):
    model = model_with_bytes(normalization_rule_name=rule, add_dummy_prefix=prefix)
    with pytest.raises(TokenizerError, match="they do not give the text back"):
        tokenizers.tokenizer_from_bytes("subwords", model)


def model_with_bytes(**options) -> bytes:
    """Another's model of SentencePiece: unknown characters are bytes, one piece each."""
    model = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 264} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["x y"] * 9), model_writer=model, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def test_bytes_of_a_file_that_is_no_text():
    data = bytes(range(256)) * 2 + "é".encode()
    tokenizer = ByteTokenizer()
    text = data.decode(errors="surrogateescape")
    tokens = tokenizer.encode(text)
    assert np.uint8(tokens).tobytes() == data
    assert tokenizer.decode(tokens).encode()  # can be printed
    assert tokenizer.num_characters(tokens, text) == len(text)
