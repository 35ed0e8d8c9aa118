"""docs/parity.md: the largest difference of each quantity, counts, and a bar in a test's name."""

import pytest

import parity
from jaxgru.cli.options import run_script
from pages.markdown import TABLE

FAILS = "def test_it():\n    assert 'ours' == 'theirs'\n"


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
    tables = parity.tables(records, "3 passed", "python scripts/parity.py")
    text = "\n".join(tables.values())
    prose = " ".join(text.split())
    assert "**5 checks** pass: 4 comparisons of 1,050 numbers, and 1 tests of" in prose
    assert "| torchref | 4 | = | = |" in text
    assert "| a step | 3 | 30 | 2.0e-09 | = | 1.0e-06 | 3.0e-05 | = | 1.0e-06 |" in text
    assert "| tokens | 1 | 1,000 | = | = | = | = | = | = |" in text
    assert "| init | 5,000 | 0.500 |" in text
    assert {name for _, name, *_ in TABLE.findall(parity.PAGE.read_text())} == {*tables}


@pytest.mark.slow
def test_a_suite_that_fails_shows_pytests_output_and_then_one_sentence(
    tmp_path, monkeypatch, capfd
):
    (tmp_path / "parity_tests").mkdir()
    (tmp_path / "parity_tests" / "test_it.py").write_text(FAILS)
    monkeypatch.setattr(parity, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["parity.py"])
    with pytest.raises(SystemExit, match="2"):
        run_script(parity.main)
    out, err = capfd.readouterr()
    assert "E   AssertionError: assert 'ours' == 'theirs'" in out.splitlines()
    assert err.startswith("parity.py: the tests do not pass (pytest's exit code is 1)")
