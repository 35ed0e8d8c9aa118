"""docs/parity.md: the largest difference of each quantity, counts, and a bar in a test's name."""

import parity
from maintain.plant_errors import Outcome, table


def test_the_page_says_what_was_recorded():
    same = {"kind": "values", "implementation": "torchref"}
    records = [
        same | {"quantity": "a step", "dtype": dtype, "size": size, "absolute": absolute,
                "relative": 0, "tolerance": 1e-6}
        for dtype, size, absolute in [("float64", 10, 2e-9), ("float64", 30, 1e-9),
                                      ("float32", 10, 3e-5)]
    ]  # fmt: skip
    records.append(same | {"quantity": "tokens", "dtype": "int32", "size": 1000})
    records.append({"kind": "distribution", "quantity": "init", "size": 5000, "p_value": 0.5})
    planted = table([Outcome("none", (), 3), Outcome("a bias", ("a::b[c|d]",), 3)])
    text = parity.page(records, "3 passed", "python scripts/parity.py", planted)
    prose = " ".join(text.split())
    assert "**5 checks** (4 comparisons of 1,050 numbers and 1 tests of" in prose
    assert "| torchref | 4 | = | = |" in text
    assert "| a step | 3 | 30 | 2.0e-09 | = | 1.0e-06 | 3.0e-05 | = | 1.0e-06 |" in text
    assert "| tokens | 1 | 1,000 | = | = | = | = | = | = |" in text
    assert "| init | 5,000 | 0.500 |" in text
    assert text.endswith("| none | 0 of 3 | – |\n| a bias | 1 of 3 | `b[c\\|d]` |\n")
    assert "Planted" not in parity.page(records, "3 passed", "python scripts/parity.py")
