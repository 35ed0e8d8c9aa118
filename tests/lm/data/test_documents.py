"""Units of a text: where one ends, which token says so, and which are held out."""

from __future__ import annotations

import re

import numpy as np
import pytest
from test_dataset import tiny_config

from jaxgru.errors import UserError
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.documents import encode_documents, held_out, separator_token_of, split_documents
from jaxgru.lm.data.tokenizers import CharacterTokenizer, WordTokenizer, learn_tokenizer


@pytest.mark.parametrize("text, separator, separators", [
    ("ab\nc\n", "line", ["ab", "c"]),
    ("ab\n\nc", "line", ["ab", "", "c"]),  # the last one need not have an end
    ("ab\n\nc\rd\n", "line", ["ab", "", "c\rd"]),
    ("a\nb\n\n\nc\n\n", "\n\n", ["a\nb", "\nc"]),
    ("a<|end|>b<|end|>", "<|end|>", ["a", "b"]),
    ("a\nb;c\n", ";", ["a\nb", "c\n"]),
])  # fmt: skip
def test_split_by_hand(text, separator, separators):
    """Also where all, or the first half, have the line ends of Windows, and the separator has."""
    for other in (text, text.replace("\n", "\r\n"), text.replace("\n", "\r\n", 2)):
        assert (
            split_documents(other, separator)
            == split_documents(other, separator.replace("\n", "\r\n"))
            == separators
        )


def test_encoded_by_hand():
    """The end around each; 9 characters are predicted: all but the first end."""
    tokens, size = encode_documents(CharacterTokenizer("\nabc"), ["ab", "", "cab"], "line")
    assert tokens.tolist() == [0, 1, 2, 0, 0, 3, 1, 2, 0] and tokens.dtype == np.int32
    assert size == len("ab\n\ncab\n")


def test_a_separator_is_encoded_by_itself():
    """In a text, the space before a comma belongs to it; here the comma is always one token."""
    tokenizer = WordTokenizer.learn("a,b a ,b")
    tokens, size = encode_documents(tokenizer, ["a", "b a ", "b"], ",")
    pieces = [tokenizer.pieces[token] for token in tokens]
    assert pieces == [",", "a", ",", "b", " a", " ", ",", "b", ","]
    assert size == len("a,b a ,b,")


@pytest.mark.parametrize("kind, separator", [
    ("characters", ";"), ("words", "\x1d-"), ("bytes", "é"), ("sentencepiece", "line"),
])  # fmt: skip
def test_a_tokenizer_without_such_a_token_is_refused(kind, separator, tiny_text):
    tokenizer = learn_tokenizer(kind, tiny_text.read_text().replace(";", ""), 60)
    says = f"data.separator is {separator!r}, but a tokenizer of kind {kind} has no token .* alone"
    with pytest.raises(UserError, match=re.escape(says).replace(r"\.\*", ".*")):
        separator_token_of(tokenizer, separator)


@pytest.mark.parametrize("number, fraction, drawn", [
    (1000, 0.1, 100), (25, 0.1, 2), (3, 0.1, 1), (4, 0.9, 4),
])  # fmt: skip
def test_how_many_are_held_out(number, fraction, drawn):
    mask = held_out(number, fraction, 0)
    assert mask.sum() == drawn and len(mask) == number


def test_which_are_held_out_is_drawn():
    """Reproducibly; by another seed, others; and from the whole list, not from its end."""
    mask = held_out(1000, 0.1, 7)
    np.testing.assert_array_equal(mask, held_out(1000, 0.1, 7))
    assert not np.array_equal(mask, held_out(1000, 0.1, 8))
    thirds = mask[:999].reshape(3, 333).sum(1)  # 33.3 each, within 4 standard deviations
    assert np.abs(thirds - 33.3).max() < 4 * (100 / 3 * 2 / 3) ** 0.5


UNITS = [f"{name}\nis no {i}" for i, name in enumerate(["anna", "bob", "cy", ""] * 60)]


class TestDatasets:
    def test_too_high_a_count_is_refused(self, tiny_text):
        """White space is a token of words however rare it is, and nothing to learn from."""
        for kind in ("characters", "words"):
            config = tiny_config(tiny_text, data__tokenizer=kind, data__min_count=10**6)
            with pytest.raises(UserError, match="min_count is 1000000, but nothing in .* occurs"):
                load_dataset(config)

    @pytest.mark.parametrize("separator", ["lines", "Line", "newline"])
    def test_a_slip_is_no_separator(self, separator):
        with pytest.raises(UserError, match=f"^data.separator is '{separator}'; .* write line.$"):
            tiny_config("lines.txt", data__separator=separator)

    @pytest.mark.parametrize("separator, end", [("\n\n", "\x1e"), (";", ";"), ("<|end|>", "\x1e")])
    @pytest.mark.parametrize("kind", ["characters", "subwords", "words"])
    def test_hold_out_whole_separators(self, tmp_path, kind, separator, end):
        """All of them are in one of the two splits, in their order, with the end around each."""
        (tmp_path / "separators.txt").write_text(separator.join(UNITS))
        options = {"data__separator": separator, "data__tokenizer": kind, "model__vocab_size": 280}
        options |= {"data__min_count": int(kind == "words"), "data__validation_fraction": 0.25}
        config, dataset = load_dataset(tiny_config(tmp_path / "separators.txt", **options))
        mask = held_out(240, 0.25, 0)
        for tokens, chosen in ((dataset.train, ~mask), (dataset.validation, mask)):
            separators = [one for one, kept in zip(UNITS, chosen, strict=True) if kept]
            text = dataset.tokenizer.decode(tokens)
            assert text == end + "".join(f"{one}{end}" for one in separators)
            assert (tokens == dataset.separator_token).sum() == len(separators) + 1
        size = sum(len(one) + len(separator) for one, held in zip(UNITS, mask, strict=True) if held)
        assert dataset.num_characters == size
        assert config.model.vocab_size == dataset.tokenizer.vocab_size

    def test_by_another_seed_and_of_another_text(self, tmp_path):
        path = tmp_path / "lines.txt"
        path.write_text("".join(f"{i}\n" for i in range(1000)))
        (tmp_path / "more.txt").write_text("12\n7")

        def validation(**options):
            return load_dataset(
                tiny_config(path, data__separator="line", training__sequence_length=16, **options)
            )[1]

        zero = validation()
        one = validation(data__validation_seed=1)
        assert zero.validation.tolist() != one.validation.tolist()
        nothing = validation(data__validation_fraction=0)
        np.testing.assert_array_equal(nothing.validation, zero.validation)
        text = nothing.tokenizer.decode(nothing.train)
        assert text == "\n" + path.read_text()
        other = validation(data__validation=str(tmp_path / "more.txt"))
        assert other.tokenizer.decode(other.validation) == "\n12\n7\n"
        np.testing.assert_array_equal(other.train, nothing.train)

    def test_a_ring_has_one_end_where_it_closes(self, tmp_path):
        (tmp_path / "lines.txt").write_text("".join(f"{i}\n" for i in range(1000)))
        options = {"data__separator": "line", "data__batches": "streams", "training__batch_size": 2}
        config = tiny_config(tmp_path / "lines.txt", training__sequence_length=16, **options)
        whole = load_dataset(config)[1].train
        ring = tiny_config(
            tmp_path / "lines.txt", training__sequence_length=16, training__random_offset=True,
            **options,
        )  # fmt: skip
        np.testing.assert_array_equal(load_dataset(ring)[1].train, whole[1:])

    @pytest.mark.parametrize("text, separator, says", [
        ("a" * 3000, "line", r"data.separator is 'line', but the file .* has no two documents "),
        ("a\n" * 3000, "\n\n", r".* no two documents with '\\n\\n' between"),
        ("a;;b\x1e;;" * 900, ";;", r"data.separator is ';;', which a model reads as U\+001E, but "),
    ])  # fmt: skip
    def test_that_have_none_are_refused(self, tmp_path, text, separator, says):
        (tmp_path / "text.txt").write_text(text)
        with pytest.raises(UserError, match=says):
            load_dataset(tiny_config(tmp_path / "text.txt", data__separator=separator))
