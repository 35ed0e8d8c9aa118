"""docs/parity.md: the largest difference of each quantity, counts, and a bar in a test's name."""

import pytest

import parity
from jaxgru.cli.options import run_script
from jaxgru.errors import UserError
from maintain import plant_errors
from maintain.plant_errors import Outcome, table
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
    planted = table([Outcome("none", (), 3), Outcome("a bias", ("a::b[c|d]",), 3)])
    tables = parity.tables(records, "3 passed", "python scripts/parity.py")
    text = "\n".join(tables.values())
    prose = " ".join(text.split())
    assert "**5 checks** pass: 4 comparisons of 1,050 numbers, and 1 tests of" in prose
    assert "| torchref | 4 | = | = |" in text
    assert "| a step | 3 | 30 | 2.0e-09 | = | 1.0e-06 | 3.0e-05 | = | 1.0e-06 |" in text
    assert "| tokens | 1 | 1,000 | = | = | = | = | = | = |" in text
    assert "| init | 5,000 | 0.500 |" in text
    assert planted.endswith("| none | 0 of 3 | – |\n| a bias | 1 of 3 | `b[c\\|d]` |\n")
    assert {name for _, name, *_ in TABLE.findall(parity.PAGE.read_text())} == {
        *tables,
        "planted errors",
    }


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
    *shown, sentence = err.splitlines()
    assert out == "" and "E   AssertionError: assert 'ours' == 'theirs'" in shown
    assert sentence.startswith("parity.py: the tests do not pass (pytest's exit code is 1)")


@pytest.mark.slow
def test_planted_errors_need_a_suite_that_passes_without_them(tmp_path, capfd):
    (tmp_path / "jaxgru").mkdir()
    (tmp_path / "jaxgru" / "__init__.py").touch()
    (tmp_path / "test_it.py").write_text(FAILS + "\ndef test_other():\n    pass\n")
    assert plant_errors._run(tmp_path, ("test_it.py",)) == (("test_it.py::test_it",), 2)
    for tests, code in (("test_it.py", 1), ("test_none.py", 4)):
        with pytest.raises(UserError, match=f"exit code is {code}"):
            plant_errors._run(tmp_path, (tests,), may_fail=False)
    assert "E   AssertionError: assert 'ours' == 'theirs'" in capfd.readouterr().err.splitlines()


def test_an_error_that_no_test_noticed_is_named():
    with pytest.raises(UserError, match="no test noticed: a bias."):
        plant_errors.check([Outcome("none", (), 3), Outcome("a bias", (), 3)])


def test_the_texts_of_the_planted_errors_are_in_the_package():
    for _, *changes in plant_errors.ERRORS.values():
        for file, right, _ in changes:
            assert right in (plant_errors.ROOT / "jaxgru" / file).read_text(), (file, right)
