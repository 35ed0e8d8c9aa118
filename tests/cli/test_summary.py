"""The table of layers, or of parameters: the published totals, and rows that add up to them."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

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


class Row(NamedTuple):
    """A row of the printed table."""

    name: str
    shapes: str
    count: str
    mebibytes: str


def summary_rows(name: str, capsys, full: bool, **overrides: Any) -> list[Row]:
    """The printed table, with its head; the last row is the total."""
    print_summary(load_config(name, {k.replace("__", "."): v for k, v in overrides.items()}), full)
    rows = [re.split("[│┃]", line)[1:-1] for line in capsys.readouterr().out.splitlines()]
    return [Row(*map(str.strip, row)) for row in rows if len(row) == 4]


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_add_up_to_the_published_total(name, capsys):
    """A row for each parameter or for each layer; its shapes have as many numbers."""
    head, *parameters, total = summary_rows(name, capsys, full=True)
    assert head == ("parameter", "shape", "count", "MiB")
    head, *layers, same_total = summary_rows(name, capsys, full=False)
    assert head == ("layer", "shapes", "count", "MiB") and same_total == total
    count_of = lambda row: int(row.count.replace(",", ""))
    for row in parameters + layers:
        size = 0
        for part in row.shapes.split(", "):
            times, shape = re.fullmatch(r"(?:(\d+) of )?([\d× ]+)", part).groups()
            size += int(times or 1) * math.prod(map(int, shape.split("×")))
        assert count_of(row) == size and row.mebibytes == f"{4 * size / 2**20:.3f}"
    for row in layers:
        within = [p for p in parameters if f"{p.name}.".startswith(f"{row.name}.")]
        assert count_of(row) == sum(map(count_of, within))
    model = load_config(name).model
    names = [f"layers.{i}" for i in range(model.num_layers)] + ["norm"] * model.final_norm
    assert [row.name for row in layers] == ["embedding", *names, "head"]
    count, mebibytes = PUBLISHED[name]
    digits = len(mebibytes.split(".")[1])
    assert f"{sum(map(count_of, layers)):,}" == total.count == count
    assert total.name == "total" and f"{float(total.mebibytes):.{digits}f}" == mebibytes


def test_every_parameter_of_astra_alpha_has_its_row(capsys):
    """V 65, E 64, H 128: the gates of the products and of the biases side by side."""
    _, *parameters, _ = summary_rows("astra_alpha", capsys, full=True)
    rows = {row.name: row.shapes for row in parameters}
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
    assert total.count == "86,657"


def test_a_tied_embedding_is_counted_once(capsys):
    options = dict(model__embedding_dim=128, model__tied_embedding=True)
    printed = summary_rows("astra_alpha", capsys, full=True, **options)
    rows = {row.name: row.count for row in printed}
    assert "head.Wo" not in rows
    assert rows["total"] == f"{86_913 + 64 * 384 - 65 * 64:,}"  # layers.0.W is wider
