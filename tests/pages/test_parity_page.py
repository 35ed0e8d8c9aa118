"""docs/parity.md: the largest difference of each kind of quantity, and counts."""

import parity
from pages.markdown import TABLE


def test_the_tables_say_what_was_recorded():
    same = {"kind": "values", "implementation": "torchref"}
    figures = [
        ("gru: one step", "float64", 10, 2e-9),
        ("lstm: one step", "float64", 30, 1e-9),
        ("gru: one step", "float32", 10, 3e-5),
        ("gru: a layer, outputs", "float64", 1, 0),
    ]
    records = [
        same
        | {
            "quantity": quantity,
            "dtype": dtype,
            "size": size,
            "absolute": relative,
            "relative": relative,
            "tolerance": 1e-6,
        }
        for quantity, dtype, size, relative in figures
    ]
    for weight, p_value in [("U", 0.5), ("W", 0.25)]:
        quantity = f"gru: initialisation of {weight}"
        draw = {"kind": "distribution", "size": 5000, "quantity": quantity, "p_value": p_value}
        records.append(draw)
    tables = parity.tables(records, "3 passed", "python scripts/parity.py")
    text = "\n".join(tables.values())
    assert "**6 checks** pass: 4 comparisons of 51 numbers, and 2 tests of" in text
    assert "| torchref | 4 | 2.0e-09 | 3.0e-05 |" in text
    assert "| one step | 3 | 30 | 2.0e-09 | 1.0e-06 | 3.0e-05 | 1.0e-06 |" in text
    assert "| outputs | 1 | 1 | = | 1.0e-06 | – | – |" in text
    assert "| initial weights, against torchref's draws | 2 | 5,000 | 0.250 |" in text
    assert {name for _, name, *_ in TABLE.findall(parity.PAGE.read_text())} == {*tables}
