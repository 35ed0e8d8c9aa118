"""The table of layers, or of parameters: the published totals, and rows that add up to them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from jaxgru.cli.summary import print_summary
from jaxgru.lm.config import load_config

# Parameters and MiB of the reference's table ("MB" there), as precisely as they are given there.
PUBLISHED = {
    "astra_alpha": ("86,913", "0.33"),
    "astra_beta": ("715,713", "2.73"),
    "astra_gamma": ("4,383,041", "16.72"),
    "scribe_alpha": ("1,075,688", "4.1"),
    "scribe_beta": ("5,102,056", "19.5"),
    "scribe_gamma": ("14,439,400", "55.1"),
    "leviathan": ("24,248,129", "92.50"),
}


def summary_rows(name: str, capsys, full: bool, **overrides: Any) -> list[list[str]]:
    """The printed table: each row's four cells; the last row is the total."""
    print_summary(load_config(name, {k.replace("__", "."): v for k, v in overrides.items()}), full)
    rows = [re.split("[│┃]", line)[1:-1] for line in capsys.readouterr().out.splitlines()]
    return [[cell.strip() for cell in row] for row in rows if len(row) == 4]


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_add_up_to_the_published_total(name, capsys):
    header, *rows, total = summary_rows(name, capsys, full=True)
    assert header == ["parameter", "shape", "count", "MiB"]
    counts = [int(row[2].replace(",", "")) for row in rows]
    shapes = [[int(n) for n in row[1].split("×")] for row in rows]
    assert counts == [math.prod(shape) for shape in shapes]
    for row, count in zip(rows, counts, strict=True):
        assert row[3] == f"{4 * count / 1_048_576:.3f}"
    published, mebibytes = PUBLISHED[name]
    digits = len(mebibytes.split(".")[1])
    assert total[0] == "total" and f"{sum(counts):,}" == total[2] == published
    assert f"{float(total[3]):.{digits}f}" == mebibytes
    assert summary_rows(name, capsys, full=False)[-1] == total


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_for_each_layer(name, capsys):
    """Its numbers are the sums of its parameters' rows; its shapes have as many numbers."""
    header, *rows, _ = summary_rows(name, capsys, full=False)
    assert header == ["layer", "shapes", "count", "MiB"]
    counts = {row[0]: int(row[2].replace(",", "")) for row in rows}
    model = load_config(name).model
    layers = [f"layers.{i}" for i in range(model.num_layers)]
    assert list(counts) == ["embedding", *layers, *["norm"] * model.final_norm, "head"]
    parameters = summary_rows(name, capsys, full=True)[1:-1]
    for row in rows:
        within = [p for p in parameters if p[0] == row[0] or p[0].startswith(f"{row[0]}.")]
        assert counts[row[0]] == sum(int(p[2].replace(",", "")) for p in within)
        shapes = [re.fullmatch(r"(?:(\d+) of )?([\d×]+)", part) for part in row[1].split(", ")]
        assert sum(int(s[1] or 1) for s in shapes) == len(within)
        assert counts[row[0]] == sum(
            int(s[1] or 1) * math.prod(map(int, s[2].split("×"))) for s in shapes
        )
        assert row[3] == f"{4 * counts[row[0]] / 1_048_576:.3f}"


def test_every_parameter_of_astra_alpha_has_its_row(capsys):
    """V 65, E 64, H 128: the gates of the products and of the biases side by side."""
    rows = {row[0]: row[1] for row in summary_rows("astra_alpha", capsys, full=True)[1:-1]}
    expected = {"embedding": "65 × 64", "head.Wo": "128 × 65", "head.bo": "65"}
    expected |= {"layers.0.W": "64 × 384", "layers.0.U": "128 × 384"}
    expected |= {"layers.0.b": "384", "layers.0.c": "256"}
    assert rows == expected


def test_the_vocabulary_is_the_texts(script, tmp_path):
    """By hand: 5 letters, a space and a newline; a token has 64 + 128 + 1 parameters."""
    (tmp_path / "text.txt").write_text("aé日 bc\n" * 40)
    done = script("train", "--config", "astra_alpha", "--data.corpus", tmp_path / "text.txt",
                  "--training.sequence_length", 16, "--summary")  # fmt: skip
    expected = 86_913 - (65 - 7) * (64 + 128 + 1)
    assert (done.code, done.err) == (0, "") and f"{expected:,}" in done.out


def test_strict_single_bias(capsys):
    *_, total = summary_rows("astra_alpha", capsys, full=False, model__second_bias=False)
    assert total[2] == "86,657"


def test_a_tied_embedding_is_counted_once(capsys):
    options = dict(model__embedding_dim=128, model__tied_embedding=True)
    rows = {row[0]: row[2] for row in summary_rows("astra_alpha", capsys, full=True, **options)}
    assert "head.Wo" not in rows
    assert rows["total"] == f"{86_913 + 64 * 384 - 65 * 64:,}"  # layers.0.W is wider
