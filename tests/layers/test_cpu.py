"""The native kernel for CPUs against the scan in float64, alone and under JAX's transformations."""

import ctypes
import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from conftest import ROOT, slow

import jaxgru
from jaxgru.cells import gru, lstm
from jaxgru.cells.base import Constants, Steps, hidden
from jaxgru.cells.products import Lookup
from jaxgru.layers import cpu
from jaxgru.layers.cpu import build, library
from jaxgru.layers.implementations import unroll_layer

pytestmark = pytest.mark.skipif(cpu.why_not() is not None, reason=str(cpu.why_not()))

INIT = {
    "before": partial(jaxgru.init_gru, reset_gate="before"),
    "after": partial(jaxgru.init_gru, second_bias=True),
    "lstm": jaxgru.init_lstm,
    "rnn": jaxgru.init_rnn,
}
V = 7  # rows of the table of a lookup


@pytest.fixture(autouse=True)
def also_the_smallest(monkeypatch, forget_traces):
    monkeypatch.setattr(cpu, "FEWEST", 1)


def layer_of(kind, E, H, rng=None, models=()):
    """Random parameters; products with them are about as large as what they multiply."""
    rng = rng or np.random.default_rng(0)
    like = jax.eval_shape(lambda: INIT[kind](jax.random.key(0), E, H))

    def normal(leaf):
        fan_in = leaf.shape[0] if leaf.ndim == 2 else 4
        return (rng.normal(size=(*models, *leaf.shape)) / np.sqrt(fan_in)).astype(np.float32)

    return jax.tree.map(normal, like)


def wide(tree):
    """The same values in float64."""
    double = lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf
    return jax.tree.map(lambda leaf: double(np.asarray(leaf)), tree)


def close(seen, exact, T, B, E, H):
    """Assert that values differ by float32's rounding from those of float64.

    On the longest way to a value, n roundings follow one another: T steps forward and backward,
    each a sum of E + H products and about 8 operations on gates; then a gradient's sum of T·B
    products. Roundings of 2⁻²⁴ each are nearly independent; their sum is below 4·√n·2⁻²⁴ of what is
    summed but for one value in 1,500 (Higham & Mary 2019, Theorem 2.4: 1 − 2·exp(−λ²/2), which is
    far above what happens). What is summed is as large as the array's largest value, or as 1, the
    size of states and of the gradients given, where it cancels.
    """
    bound = 4 * np.sqrt(2 * T * (E + H + 8) + T * B) * 2.0**-24
    assert jax.tree.structure(seen) == jax.tree.structure(exact)
    for a, b in zip(*map(jax.tree.leaves, (seen, exact)), strict=True):
        assert a.shape == b.shape and a.dtype == jnp.float32
        a, b = np.asarray(a, np.float64), np.asarray(b)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        largest = partial(np.nanmax, initial=0)  # also if all are NaN
        assert largest(np.abs(a - b)) <= bound * max(1, largest(np.abs(b)))


# --- Values and gradients of one layer


def run(implementation, reverse, every, inputs, marks, cotangents):
    """What a layer returns, and the gradients of its inputs: parameters, x, carry, initial."""
    ids, keep, reset, real, scale = marks

    def function(layer, x, carry, initial):
        steps = Steps(x if ids is None else Lookup(x, ids), keep, reset, real)
        constants = Constants(initial, scale)
        return unroll_layer(layer, carry, steps, constants, implementation, reverse, every)

    outputs, gradients = jax.vjp(function, *inputs)
    return outputs, gradients(cotangents)


@partial(jax.jit, static_argnums=0)
def scanned(reverse, *arguments):
    """The carry of every step by the scan."""
    return run("scan", reverse, True, *arguments)


@functools.cache
def drawn_of(kind, T, B, E, H):
    """Everything that a layer can be given."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    state = lambda *of: lstm.LSTMState(normal(*of), normal(*of)) if kind == "lstm" else normal(*of)
    return dict(
        inputs=(layer_of(kind, E, H, rng), normal(T, B, E), state(B, H), state(B, H)),
        table=normal(V, E),
        ids=rng.integers(0, V, (T, B), np.int32),
        keep=rng.random((T, B, H)) < 0.7,
        reset=rng.random((T, B)) < 0.4,
        real=rng.random((T, B)) < 0.7,
        cotangents=(state(T, B, H), state(B, H)),
    )


def check(kind, sizes, features):
    """Compare a layer with these features with the scan, which has all of them, to no effect."""
    given = drawn_of(kind, *sizes)
    (layer, x, carry, initial), (d_every, d_last) = given["inputs"], given["cotangents"]
    reverse, every, lookup = (name in features for name in ("reverse", "carries", "lookup"))
    ids = given["ids"]
    if lookup:
        x = given["table"][ids]
    if not every and kind == "lstm":
        d_every = d_every._replace(c=np.zeros_like(d_every.c))
    has = lambda name, otherwise: given[name] if name in features else otherwise
    keep, reset, real = has("keep", None), has("reset", None), has("real", None)
    scale = None if keep is None else np.float32(1.5)
    start = initial if "initial" in features else None
    seen_x, seen_ids = (given["table"], ids) if lookup else (x, None)
    (outputs, last), gradients = run(
        *("cpu", reverse, every, (layer, seen_x, carry, start)),
        (seen_ids, keep, reset, real, scale),
        (d_every if every or kind != "lstm" else d_every.h, d_last),
    )
    shape = x.shape[:2]
    marks = (
        None,
        np.ones(given["keep"].shape, bool) if keep is None else keep,
        np.zeros(shape, bool) if reset is None else reset,
        np.ones(shape, bool) if real is None else real,
        np.float32(1) if scale is None else scale,
    )
    start = jax.tree.map(np.zeros_like, initial) if start is None else start
    # Reversed, the scan reads everything from the end: one program for both
    turned = partial(jax.tree.map, lambda a: a[::-1] if reverse and a.ndim > 1 else a)
    with jax.enable_x64(True):
        (exact, exact_last), exact_gradients = scanned(
            *(False, wide((layer, turned(x), carry, start))),
            wide(turned(marks)),
            wide((turned(d_every), d_last)),
        )
    dx = turned(np.asarray(exact_gradients[1]))
    if lookup:
        np.add.at(of_table := np.zeros(given["table"].shape), ids, dx)
        dx = of_table
    n = 4 if "initial" in features else 3
    exact = turned(exact if every else hidden(exact))
    expected = exact, exact_last, (exact_gradients[0], dx, *exact_gradients[2:])[:n]
    close((outputs, last, gradients[:n]), expected, *sizes)


FEATURES = {
    "nothing": "",
    "resets": "reset",
    "resets to a state": "reset initial",
    "lengths": "real",
    "dropout": "keep",
    "reverse": "reverse",
    "carries": "carries",
    "lookup": "lookup",
    "everything": "reset initial real keep reverse carries",
    "everything looked up": "reset initial real keep reverse carries lookup",
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kind", INIT)
def test_values_and_gradients(kind, features):
    check(kind, (5, 9, 4, 33), FEATURES[features].split())


SIZES = [
    (16, 1, 1, 1),
    (1, 65, 33, 16),
    (9, 2, 33, 128),
    (4, 9, 1, 100),
    (3, 300, 5, 33),
    (2, 2, 1, 1000),
]


@pytest.mark.parametrize("features", ["nothing", *slow("everything", "everything looked up")])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["after", "lstm", *slow("before", "rnn")])
def test_values_and_gradients_of_other_sizes(kind, sizes, features):
    """T steps of B rows with E features and H units: whole vectors and parts, rows and blocks."""
    check(kind, sizes, FEATURES[features].split())


@pytest.mark.parametrize("kind", INIT)
def test_numbers_that_the_table_does_not_have(kind):
    """Their rows are NaN from there to the next reset, and only theirs; they have no gradient."""
    sizes = T, B, _, H = 4, 9, 3, 33
    given = drawn_of(kind, *sizes)
    ids, reset = given["ids"].copy(), np.zeros((T, B), bool)
    ids[1, 0], ids[3, 4], ids[2, 8], reset[3, 0] = -1, V, 2**31 - 1, True
    layer, _, carry, initial = given["inputs"]
    inputs, marks = (layer, given["table"], carry, initial), (ids, None, reset, None, None)
    d_every, d_last = given["cotangents"]
    seen = run("cpu", False, True, inputs, marks, (d_every, d_last))
    with jax.enable_x64(True):
        scan = jax.jit(partial(run, "scan", False, True))
        exact = scan(wide(inputs), marks, wide((d_every, d_last)))
    close(seen, exact, *sizes)
    lost = np.isnan(hidden(seen[0][0])).all(2)
    expected = np.zeros((T, B), bool)
    expected[1:3, 0] = expected[3:, 4] = expected[2:, 8] = True
    np.testing.assert_array_equal(lost, expected)


@pytest.mark.parametrize("kind", ["after", "lstm"])
def test_what_is_in_the_padding_reaches_nothing(kind):
    """Neither outputs nor gradients, bit for bit; also inside the kernel, whatever x holds."""
    given = drawn_of(kind, 5, 9, 4, 33)
    layer, x, carry, _ = given["inputs"]
    padded = np.where(given["real"][..., None], x, np.float32(3))
    seen, expected = (
        run("cpu", False, True, (layer, of, carry, None), (None, None, given["reset"], given["real"], None), given["cotangents"])
        for of in (padded, x)
    )  # fmt: skip
    for a, b in zip(*map(jax.tree.leaves, (seen, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(seen[1][1])[~given["real"]].any()


# --- JAX's transformations, of a scalar of a layer and its input

T, B, E, H = SMALL = 4, 5, 3, 17
RESET = np.random.default_rng(2).random((B, T)) < 0.3
MODELS = 3


def value(implementation, layer, x):
    """A scalar in which every output takes part with its own weight."""
    outputs = jaxgru.unroll(layer, x, implementation=implementation, reset=RESET)
    weights = lambda a: np.cos(np.arange(a.size)).reshape(a.shape)
    return sum((a * weights(a).astype(a.dtype)).sum() for a in jax.tree.leaves(outputs))


def of_both(f):
    return jax.grad(f, (0, 1))


def of_gradients(f):
    """The gradient of a function of the gradient."""
    return of_both(lambda *a: sum(jnp.sin(g).sum() for g in jax.tree.leaves(of_both(f)(*a))))


def over_calls(f):
    step = lambda layer: lambda total, x: (total + f(layer, x), None)
    return of_both(lambda layer, xs: jax.lax.scan(step(layer), jnp.zeros((), xs.dtype), xs)[0])


def grad_of_vmap(f, axes):
    return of_both(lambda *a: jnp.sin(jax.vmap(f, axes)(*a)).sum())


ROWS, WEIGHTS, BOTH = (None, 0), (0, None), (0, 0)
WAYS = {  # which arguments are several, and what is done
    "jit": ((None, None), lambda f: f),
    "grad": ((None, None), of_both),
    "grad of grad": ((None, None), of_gradients),
    "checkpoint": ((None, None), lambda f: of_both(jax.checkpoint(f))),
    "scan over calls": (ROWS, over_calls),
    **{
        f"{name} over {what}": (axes, partial(way, axes))
        for what, axes in dict(rows=ROWS, weights=WEIGHTS, both=BOTH).items()
        for name, way in {
            "vmap": lambda axes, f: jax.vmap(f, axes),
            "vmap of grad": lambda axes, f: jax.vmap(of_both(f), axes),
            "grad of vmap": lambda axes, f: grad_of_vmap(f, axes),
            "vmap of grad of grad": lambda axes, f: jax.vmap(of_gradients(f), axes),
        }.items()
    },
}
SELDOM = [way for way in WAYS if "vmap of grad of" in way]


@pytest.mark.parametrize("way", [*(way for way in WAYS if way not in SELDOM), *slow(*SELDOM)])
@pytest.mark.parametrize("kind", ["lstm", *slow("before", "after", "rnn")])
def test_transformations(kind, way):
    (of_layer, of_x), transformed = WAYS[way]
    several = lambda axis: () if axis is None else (MODELS,)
    rng = np.random.default_rng(3)
    layer = layer_of(kind, E, H, rng, several(of_layer))
    x = rng.normal(size=(*several(of_x), B, T, E)).astype(np.float32)
    lowered = jax.jit(transformed(partial(value, "cpu"))).lower(layer, x)
    assert "custom_call @jaxgru_forward" in lowered.as_text()
    with jax.enable_x64(True):
        exact = jax.jit(transformed(partial(value, "scan")))(*wide((layer, x)))
    # a gradient's gradient goes forward and backward twice; several models are added up
    close(lowered.compile()(layer, x), exact, 2 * T, MODELS * B, E, H)


@pytest.mark.parametrize("kind", ["before", "lstm"])
def test_programs_for_elsewhere_do_without_the_kernel(kind):
    """An exported one may run on a machine without it; another platform has none."""
    layer, x = layer_of(kind, E, H), np.ones((B, T, E), np.float32)
    gradient = jax.jit(of_both(partial(value, "cpu")))
    exported = jax.export.export(gradient)(layer, x)
    cuda = gradient.trace(layer, x).lower(lowering_platforms=("cuda",))
    for text in exported.mlir_module(), cuda.as_text():
        assert "stablehlo.dot_general" in text and "custom_call @jaxgru_" not in text
    with jax.enable_x64(True):
        exact = of_both(partial(value, "scan"))(*wide((layer, x)))
    close(jax.export.deserialize(exported.serialize()).call(layer, x), exact, *SMALL)


def test_calls_at_once_and_again_give_the_same_bits():
    """Several threads of Python share the pool of XLA's threads."""
    layer, x = layer_of("lstm", 8, 130), np.ones((70, 9, 8), np.float32)
    gradient = jax.jit(
        of_both(lambda *a: jnp.sin(jaxgru.unroll(*a, implementation="cpu")[0]).sum())
    )
    bits = lambda _: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(gradient(layer, x))]
    first = bits(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(again == first for again in pool.map(bits, range(12)))


@functools.cache
def on_two_devices():
    """What cpu_on_two_devices.py has seen, with a pool of 10 threads."""
    command = [sys.executable, str(Path(__file__).with_name("cpu_on_two_devices.py"))]
    environment = {**os.environ, "NPROC": "10"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["auto", "explicit", "shard_map"])
def test_a_sharded_batch_stays_on_its_devices(how):
    for seen in on_two_devices()[how].values():
        assert seen["calls"] and seen["collectives"] == ["all-reduce"]  # of the weights' gradients
        assert seen["rows"] == [13] and seen["sharded"]  # no array holds all 26
        assert seen["difference"] < 1e-4  # float32 against float64: sums of 182 numbers below 10


def test_the_number_of_threads_changes_no_bit():
    """1, 2 and 5 of them, of 3 rows, whose units they divide, and of 70 rows."""
    for rows, of_threads in on_two_devices()["threads"].items():
        assert len(of_threads) == 3 and len(set(of_threads.values())) == 1, rows


# --- The gates, and each instruction set


def worst_of_gates(x):
    """The largest errors of tanh and σ, in units in the last place of float32."""
    seen = np.empty((2, x.size), np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, *seen)]
    cpu.kernel().gates(*pointers, ctypes.c_long(x.size))
    with np.errstate(over="ignore"):
        exact = np.tanh(x.astype(np.float64)), 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_array_equal(np.isnan(seen), np.isnan(exact))
    np.testing.assert_array_equal(np.signbit(seen[0]), np.signbit(x))
    small = exact[1] < 2.0**-125  # XLA sets smaller numbers to zero
    assert ((0 <= seen[1][small]) & (seen[1][small] <= 2.0**-125)).all()
    seen[1][small], exact[1][small] = 0, 0
    return [
        np.nanmax(np.abs(a - b) / np.spacing(np.abs(b).astype(np.float32)), initial=0)
        for a, b in zip(seen, exact, strict=True)
    ]


@pytest.mark.parametrize("apart", [7919, *slow(1)])
def test_tanh_and_sigmoid_within_three_units_in_the_last_place(apart):
    """Of all float32 values, every 7,919th, and the special ones: numbers of every exponent."""
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 87, -87, 88, -88])
    worst = [worst_of_gates(special.astype(np.float32))]
    for first in range(0, 2**32, 2**24 * apart):
        numbers = np.arange(first, min(first + 2**24 * apart, 2**32), apart)
        x = numbers.astype(np.uint32).view(np.float32)
        worst.append(worst_of_gates(np.where(np.isnan(x), np.float32(0), x)))
    assert np.max(worst, axis=0).max() < 3


def other_process(code, **environment):
    """Run pytest in another process, after some code; it must pass."""
    arguments = "pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', *sys.argv[1:]])"
    code = f"import sys, pytest\n{code}\nsys.exit({arguments})"
    quick = "sigmoid or everything or refused"
    return subprocess.run(
        [sys.executable, "-c", code, __file__, "-k", quick],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("instructions", ["avx2", *slow("generic")])
def test_other_instruction_sets(instructions):
    if cpu.kernel().instructions in (instructions, "generic"):
        pytest.skip("that is what all tests run with")
    check = (
        "from jaxgru.layers import cpu\n"
        f"assert cpu.kernel().instructions == {instructions!r}"
    )  # fmt: skip
    done = other_process(check, JAXGRU_CPU_KERNEL=instructions)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_no_access_out_of_bounds(tmp_path):
    """Under AddressSanitizer and UBSan. Here each array of a call is an allocation of its own."""
    file = tmp_path / "sanitized.so"
    build.build(file, "-fsanitize=address,undefined -g -O1".split())
    libraries = [
        subprocess.run(
            [build.compiler(), f"-print-file-name={name}"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    done = other_process(
        f"from pathlib import Path\nfrom jaxgru.layers.cpu import library\n"
        f"library.PATH = Path({str(file)!r})\nassert library.why_not() is None",
        LD_PRELOAD=":".join(libraries),
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
    )
    assert done.returncode == 0 and "Sanitizer" not in done.stderr, done.stdout + done.stderr


# --- What the kernel does not compute


def of_steps(layer, x, carry, implementation):
    steps = Steps(jnp.asarray(x), None, None, None)
    outputs = unroll_layer(layer, carry, steps, implementation=implementation)
    return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(outputs))


@pytest.mark.parametrize("what", ["bfloat16", "float16", "float64", "few rows", "symbolic sizes"])
@pytest.mark.parametrize("kind", ["after", "lstm"])
def test_what_is_not_supported_takes_the_scan(kind, what, monkeypatch):
    """The program, and so every bit, is that of the implementation "scan"."""
    monkeypatch.setattr(cpu, "FEWEST", 16)
    dtype = jnp.dtype(what if "float" in what else "float32")
    of = (3, 5) if what == "few rows" else (2, 8)
    if what == "symbolic sizes":
        of = jax.export.symbolic_shape("T, B")
    with jax.enable_x64(dtype == np.float64):
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
        layer = jax.tree.map(lambda leaf: shape(*leaf.shape), layer_of(kind, E, H))
        carry = shape(of[1], H)
        carry = lstm.LSTMState(carry, carry) if kind == "lstm" else carry
        texts = {
            name: jax.jit(jax.grad(partial(of_steps, implementation=name)))
            .trace(layer, shape(*of, E), carry).jaxpr
            for name in ("scan", "cpu", "auto")
        }  # fmt: skip
    texts = {str(text) for text in texts.values()}
    assert len(texts) == 1 and "jaxgru_forward" not in texts.pop()


def test_another_recurrence_is_not_supported():
    """Also one that only looks like ours."""
    layer = gru.prepare(jax.tree.map(jnp.asarray, layer_of("after", E, H)))
    steps = Steps(jnp.ones((4, 8, E)), None, None, None)
    assert cpu.supports(layer, jnp.ones((8, H)), steps)
    other = layer._replace(recurrence=layer.recurrence._replace(step=lambda *a: None))
    assert not cpu.supports(other, jnp.ones((8, H)), steps)


@pytest.fixture
def loaded(monkeypatch):
    """Load the library anew, as the test has changed it."""

    def load():
        monkeypatch.setattr(library, "_load", functools.cache(library._load.__wrapped__))
        return library.why_not()

    return load


@pytest.mark.parametrize(
    "what, why",
    [
        ("no file", "it was not built when jaxgru was installed"),
        ("no library", "cannot be loaded: "),
        ("no kernel", "cannot be loaded: "),
        ("another jaxlib", f"it was built for jaxlib {jaxlib.__version__}, and this is 0.0.1"),
        ("asked for none", "JAXGRU_CPU_KERNEL is none"),
    ],
)
def test_without_a_kernel_the_scan_runs(what, why, loaded, monkeypatch, tmp_path):
    file = tmp_path / "_kernel.so"
    if what == "no library":
        file.write_text("This is no library.")
    if what == "no kernel":
        file = next(Path(jaxlib.__file__).parent.glob("_jax*.so"))
    if what in ("no file", "no library", "no kernel"):
        monkeypatch.setattr(library, "PATH", file)
    if what == "another jaxlib":
        monkeypatch.setattr(jaxlib, "__version__", "0.0.1")
    if what == "asked for none":
        monkeypatch.setenv("JAXGRU_CPU_KERNEL", "none")
    assert why in loaded()
    with pytest.raises(RuntimeError, match="there is no kernel for CPUs: "):
        library.kernel()
    layer, x = layer_of("lstm", E, H), np.ones((B, T, E), np.float32)
    seen, expected = (
        str(jax.make_jaxpr(partial(value, name))(layer, x)) for name in ("cpu", "scan")
    )
    assert seen.replace("cpu", "scan") == expected


# --- The calls themselves


def native_calls(kind, lookup):
    """Each call's name, operands, results and attributes, with everything a layer can be given."""
    layer = jax.tree.map(jnp.asarray, layer_of(kind, 5, 17))
    prepared = jaxgru.cells.cell_of(layer).prepare(layer)
    T, B, E, H, GH = 3, 2, 5, 17, prepared.b.size
    f32 = lambda *shape: np.zeros(shape, np.float32)
    no, pair, before = f32(0), kind == "lstm", kind == "before"
    U, second = [*prepared.U, no][:2]
    Un, cn = (second, no) if before else (no, second)
    h, every, flags = f32(B, H), f32(T, B, H), np.ones((T, B), bool)
    c, every_c = (h, every) if pair else (no, no)
    x, W, b, table = (no, no, no, f32(V, GH)) if lookup else (f32(T, B, E), f32(E, GH), f32(GH), no)
    ids = np.zeros((T, B) if lookup else 0, np.int32)
    index = [known is prepared.recurrence for known in cpu.RECURRENCES].index(True)
    saved = f32(T, B, cpu.kernel().saved_floats(index, H))
    marks = flags, flags, np.ones((T, B, H), bool), np.float32(1)
    common = [x, ids, table, W, U, Un, h, c, *marks, h, c]
    options = dict(kind=np.int64(index), threads=np.int64(2), reverse=False, batch_major=False)
    results = [every, every_c, saved]
    yield "jaxgru_forward", [*common, b, cn], results, dict(options, save=True)
    given, weights = [every, every_c, h, c], [x, table, W, b, U, Un, cn]
    yield "jaxgru_backward", [*common, *results, *given], [*weights, h, c, h, c], options


def changes(arrays):
    """The arrays, one of them wrong: with one number more, one axis more or another dtype."""
    for i, a in enumerate(arrays):
        if a.size:
            more = [np.concatenate([a, a[..., :1]], -1)] if a.ndim else []
            for wrong in *more, a[..., None], a.astype(np.int8):
                yield [*arrays[:i], wrong, *arrays[i + 1 :]]


@pytest.mark.parametrize("kind, lookup", [("lstm", False), ("after", True), ("before", False)])
def test_wrong_arrays_are_refused(kind, lookup):
    """Every operand and every result, given to XLA's call as it is."""
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    for name, operands, results, options in native_calls(kind, lookup):

        def call(operands, results, options, name=name):
            native = jax.ffi.ffi_call(name, list(map(shape, results)))
            jax.block_until_ready(jax.jit(lambda *a: native(*a, **options))(*operands))

        call(operands, results, options)  # nothing is wrong
        wrong = [(some, results, options) for some in changes(operands)]
        wrong += [(operands, some, options) for some in changes(results)]
        wrong += [(operands, results, {**options, "kind": np.int64(4)})]
        for arguments in wrong:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxgru's kernel: .*\."):
                call(*arguments)
