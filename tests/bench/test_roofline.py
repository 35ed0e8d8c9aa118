"""What a step on many devices costs, by formula: against sums by hand, and docs/scaling.md."""

import math
from pathlib import Path

import pytest
from conftest import ROOT

from bench import benchmark_page
from bench.roofline import Machine, estimate, first_bound_by_sending
from jaxgru.lm import load_config


def test_leviathan_on_eight_devices_by_hand():
    """All its arrays divide by 8 but the head's bias, 65 numbers, which each device has."""
    machine = Machine(flops=1e12, memory=1e12, link=1e9, network=1e8, step=1e-9)
    seen = estimate(load_config("leviathan"), 8, 512, machine)
    P = 24_248_129
    assert (seen.parameters, seen.moments, seen.gradients) == (4 * P, 8 * P, 4 * P)
    assert seen.sharded_parameters == 4 * ((P - 65) // 8 + 65)
    assert seen.sharded_moments == 2 * seen.sharded_parameters
    assert seen.sent == 2 * 7 * 4 * P // 8
    assert seen.sending == seen.sent / 1e9
    # 4 gates of (input + hidden) × hidden in 3 layers and the head; 2 operations, 3 passes
    products = 4 * 1024 * ((768 + 1024) + 2 * (1024 + 1024)) + 1024 * 65
    arithmetic, memory = 6 * products * 512 * 128 / 1e12, 2 * 128 * 4 * 3 * 4 * 1024**2 / 1e12
    assert seen.computing == pytest.approx(arithmetic + memory + 2 * 128 * 3 * 1e-9, rel=1e-14)
    two_nodes = estimate(load_config("leviathan"), 9, 1, machine)
    assert two_nodes.sending == two_nodes.sent / 1e8


@pytest.mark.parametrize("config", ["astra_beta", "astra_gamma", "scribe_beta", "leviathan"])
def test_the_time_of_a_step_fits_what_was_measured(config):
    """By docs/benchmarks.json: four training steps on an H200, from which 15 µs were chosen."""
    data = benchmark_page.load(ROOT / "docs" / "benchmarks.json")
    (measured,) = (
        record.median
        for record in data.records
        if "H200" in data.runs[record.run].hardware
        and (record.config, record.contestant, record.precision) == (config, "jaxgru", "tf32")
    )
    seen = estimate(load_config(config), 1, None, Machine())
    assert seen.computing == pytest.approx(measured, rel=0.09)


def test_where_sending_takes_over():
    config, machine = load_config("leviathan"), Machine(network=5e9)
    first = first_bound_by_sending(config, machine, rows=64)
    below, at = (estimate(config, n, 64, machine) for n in (first - 1, first))
    assert below.sending <= below.computing and at.sending > at.computing
    assert at.accumulation == math.ceil(at.sending / at.computing) > 1 == below.accumulation
    assert first_bound_by_sending(config, Machine(network=1e15, link=1e15), rows=64) is None


def test_the_page_is_what_the_script_makes(script):
    page = ROOT / "docs" / "scaling.md"
    copy = Path.cwd() / "scaling.md"
    copy.write_text(page.read_text())
    assert script("bench/roofline", "--update", copy).code == 0
    assert copy.read_text() == page.read_text()
    table = script("bench/roofline", "--config", "leviathan", "--rows", 512).out
    assert page.read_text().count("| --- |") == 3 and table.strip() in page.read_text()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--devices", "3"], "a batch of 64 rows cannot be shared by 3 devices"),
        (["--devices", "0"], "0 devices"),
        (["--rows", "0"], "0 rows"),
        (["--flops", "-1"], "flops is -1.0; it must be above 0"),
        (["--config", "bengio_mlp"], "only recurrences"),
        (["--update", "nowhere.md"], "No such file"),
    ],
)
def test_what_cannot_be_computed(script, arguments, says):
    done = script("bench/roofline", *arguments)
    assert done.code == 2 and says in done.err and "Traceback" not in done.err
