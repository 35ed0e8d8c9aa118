"""The table of parameters: the published totals, and rows that add up to them."""

from __future__ import annotations

import math
import re

import pytest

from jaxgru.config import load_config
from jaxgru.summary import print_summary

# Parameters and MB of the reference's table, the MB as precisely as it is given there.
PUBLISHED = {
    "astra_alpha": ("86,913", "0.33"),
    "astra_beta": ("715,713", "2.73"),
    "astra_gamma": ("4,383,041", "16.72"),
    "scribe_alpha": ("1,075,688", "4.1"),
    "scribe_beta": ("5,102,056", "19.5"),
    "scribe_gamma": ("14,439,400", "55.1"),
    "leviathan": ("24,248,129", "92.50"),
}


def summary_rows(name: str, capsys, **overrides: str) -> list[list[str]]:
    """The printed table: each row's four cells; the last row is the total."""
    print_summary(load_config(name, {k.replace("__", "."): v for k, v in overrides.items()}))
    rows = [re.split("[│┃]", line)[1:-1] for line in capsys.readouterr().out.splitlines()]
    return [[cell.strip() for cell in row] for row in rows if len(row) == 4]


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_the_published_one(name, capsys):
    count, megabytes = PUBLISHED[name]
    *_, total = summary_rows(name, capsys)
    digits = len(megabytes.split(".")[1])
    assert total[0] == "total" and total[2] == count
    assert f"{float(total[3]):.{digits}f}" == megabytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_add_up(name, capsys):
    header, *rows, total = summary_rows(name, capsys)
    assert header == ["parameter", "shape", "count", "MB"]
    counts = [int(row[2].replace(",", "")) for row in rows]
    shapes = [[int(n) for n in row[1].split("×")] for row in rows]
    assert counts == [math.prod(shape) for shape in shapes]
    assert f"{sum(counts):,}" == total[2]
    for row, count in zip(rows, counts, strict=True):
        assert row[3] == f"{4 * count / 1_048_576:.3f}"


def test_every_parameter_of_astra_alpha_has_its_row(capsys):
    """V 65, E 64, H 128: five bias vectors, and each product's matrix."""
    rows = {row[0]: row[1] for row in summary_rows("astra_alpha", capsys)[1:-1]}
    expected = {"embedding": "65 × 64", "head.Wo": "128 × 65", "head.bo": "65"}
    for gate in "zrn":
        expected[f"layers.0.W{gate}"] = "64 × 128"
        expected[f"layers.0.U{gate}"] = "128 × 128"
        expected[f"layers.0.b{gate}"] = "128"
    expected |= {"layers.0.cz": "128", "layers.0.cr": "128"}
    assert rows == expected


def test_strict_single_bias(capsys):
    *_, total = summary_rows("astra_alpha", capsys, model__second_bias="false")
    assert total[2] == "86,657"
