"""The parts that wait for a GPU: each names scripts, options and tests that there are."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from jaxgru.layers import IMPLEMENTATIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cuda():
    return runpy.run_path(str(ROOT / "scripts" / "maintain" / "cuda.py"))


def test_every_part_can_be_started(cuda):
    """A script's own parser knows its options; pytest finds the tests."""
    for minutes, command, _ in cuda["PARTS"].values():
        assert 0 < minutes <= 10
        files = [word for word in command if word.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files)
        source = "".join(path.read_text() for path in (ROOT / "scripts").rglob("*.py"))
        fields = ("--model.compute_dtype", "--model.unroll", "--config")
        options = [word for word in command if word.startswith("--") and word not in fields]
        assert all(f'"{option}"' in source for option in options)
        if "--model.unroll" in command:
            assert command[command.index("--model.unroll") + 1] in IMPLEMENTATIONS
    assert "def test_on_a_gpu" in (ROOT / "tests" / "kernels" / "test_gru_hopper.py").read_text()


def test_a_part_that_fails_or_takes_too_long_is_said(cuda):
    assert cuda["run"](["-c", "import jaxgru.errors"], 1) == "done"
    says = "import os; raise SystemExit(int(os.environ['GIVEN']))"
    assert cuda["run"](["-c", says], 1, {"GIVEN": "4"}) == "exit code 4"
    assert cuda["run"](["-c", "raise SystemExit(3)"], 1) == "exit code 3"
    assert cuda["run"](["-c", "while True: pass"], 0.001) == "stopped after 0.001 minutes"


def test_listing_does_nothing(script, monkeypatch):
    monkeypatch.setattr(os, "environ", {})  # a part would need it
    done = script("maintain/cuda", "--list", "--only", "gamma")
    assert done.code == 0
    precise = "JAX_DEFAULT_MATMUL_PRECISION=float32"
    assert f"gamma: {precise} python scripts/train.py --config astra_gamma" in done.out
    done = script("maintain/cuda", "--list", "--only", "gamma_wavefront")
    assert f"gamma_wavefront: {precise} python scripts/train.py" in done.out
    assert "--model.unroll wavefront" in done.out
    assert script("maintain/cuda", "--only", "delta").err.startswith(
        "cuda.py: there is no part 'delta'"
    )
    assert sys.argv[0].endswith("cuda.py")
