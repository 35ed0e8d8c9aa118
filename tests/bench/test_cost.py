"""How cost grows: exponents of known curves, and a small real measurement."""

import json

import pytest

from bench import cost
from bench.records import CostPoint, CostRun


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law(power):
    """Over the larger half only: the small sizes are all fixed cost here."""
    values = {1: 7.0, 2: 7.0} | {n: 3 * n**power for n in (4, 8, 16, 32)}
    assert cost.exponent(values) == pytest.approx(power, abs=1e-12)
    assert cost.exponent({4: 1.0, 8: 2.0}) == pytest.approx(1)


def test_sizes_are_the_series_own():
    T, B, H = cost.SERIES
    config = cost.sized(T, 4096, remat=True)
    assert (config.training.sequence_length, config.training.batch_size) == (4096, 16)
    assert config.training.remat and config.model.hidden_dim == 128
    assert cost.sized(B, 8, remat=False).training.batch_size == 8
    assert cost.sized(H, 256, remat=False).model.hidden_dim == 256


@pytest.mark.slow
def test_what_is_measured_is_written_and_kept(monkeypatch, tmp_path, drawn):
    """A length, plain and with remat; a second machine's run stays beside the first's."""
    small = cost.Series("T", "training.sequence_length", "tokens", {"training.batch_size": 2}, (9,))
    monkeypatch.setattr(cost, "SERIES", (small,))
    points = cost.measure_all(1, 9)
    assert [(p.value, p.remat) for p in points] == [(9, False), (9, True)]
    assert all(p.seconds > 0 and p.bytes > 200_000 for p in points)  # AdamW's moments alone
    run = CostRun(hardware="here", date="2026-11-21", command="", points=points)
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(cost.jax, "default_backend", lambda name=backend: name)
        cost.save(tmp_path, run)
        assert (tmp_path / "figures" / f"cost_{backend}.svg").stat().st_size > 5000
    assert set(json.loads((tmp_path / "cost.json").read_text())) == {"cpu", "gpu"}
    page = (tmp_path / "cost.md").read_text()
    assert page.count("## here") == page.count("Measured 2026-11-21") == 2
    assert page.count("\n| 9 |") == 2


def test_the_sentences_say_what_the_points_say():
    """Time ∝ T, B and H²; memory ∝ T, and with remat ∝ √T at a third more time."""
    points = []
    for letter, power in (("T", 1), ("B", 1), ("H", 2)):
        for value in (256, 1024, 4096, 16384):
            points.append(CostPoint(letter, value, False, float(value**power), 10**6 * value))
            if letter == "T":
                points.append(
                    CostPoint(letter, value, True, 4 * value / 3, 10**6 * int(value**0.5))
                )
    said = cost.growth(points).replace("\n", " ")
    assert "Time grows as T^1.00, B^1.00 and H^2.00, memory as T^1.00, B^1.00 and H^1.00." in said
    assert "With remat, memory grows as T^0.50." in said
    assert "16,384 tokens takes 16,384.0 MB. With remat, it takes 128.0 MB and 1.33 times" in said


def test_mistakes_are_one_sentence(script):
    done = script("bench/cost", "--largest", "128")
    assert (done.code, done.err.count("\n")) == (2, 1) and "--largest is 128" in done.err
    assert "--repeats is 0" in script("bench/cost", "--repeats", "0").err
