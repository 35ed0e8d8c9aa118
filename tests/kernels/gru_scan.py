"""What the tests of the Hopper kernels share: the GRU as a scan, with the kernels' roundings, and
distances from it; where the tests can run."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgru.cells.base import Mask
from jaxgru.kernels.gru_hopper import supports

in_a_cluster = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the interpreter has cluster barriers from JAX 0.11 on"
)
needs_a_gpu = pytest.mark.skipif(not supports(64, 64), reason="needs a Hopper GPU")


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@jax.custom_vjp
def rounded_product(x, U):
    return rounded(x) @ rounded(U)


rounded_product.defvjp(
    lambda x, U: (rounded_product(x, U), (x, U)),
    lambda x_U, dy: (rounded(dy) @ rounded(x_U[1]).T, x_U[0].T @ dy),
)


def scan(product, Uzr, Un, h0, a, mask):
    """The recurrence with any product of state and weight, differentiated by JAX."""

    def step(h, a_keep):
        (az, ar, an), keep = jnp.split(a_keep[0], 3, axis=-1), a_keep[1]
        z, r = jnp.split(jax.nn.sigmoid(jnp.concatenate([az, ar], -1) + product(h, Uzr)), 2, -1)
        n = jnp.tanh(an + product(r * h, Un))
        h = (1 - z) * h + z * n
        h = h if mask is None else jnp.where(keep, h * mask.scale, 0)
        return h, h

    return jax.lax.scan(step, h0, (a, mask and mask.keep))[1]


def problem(T, B, H, masked):
    k = jax.random.split(jax.random.key(T + B + H), 6)
    Uzr, Un = (
        jax.random.uniform(k[i], (H, n * H), minval=-1) / H**0.5 for i, n in ((0, 2), (1, 1))
    )
    h0, a = jax.random.normal(k[2], (B, H)), jax.random.normal(k[3], (T, B, 3 * H))
    mask = Mask(jax.random.bernoulli(k[4], 0.7, (T, B, H)), jnp.float32(1 / 0.7))
    return (Uzr, Un, h0, a, mask if masked else None), jax.random.normal(k[5], (T, B, H))


@partial(jax.jit, static_argnums=0)
def value_and_gradients(f, arguments, dh):
    *arguments, mask = arguments
    h, backward = jax.vjp(lambda *x: f(*x, mask), *arguments)
    return h, *backward(dh)


def distances(kernel, T, B, H, masked):
    """Compare h and each gradient with two scans: rounded alike, and exact.

    Returns, in fractions of each array's largest number: the mean and the largest distance from
    the first, then from the second. The second's are the size of what the kernel rounds.
    """
    arguments, dh = problem(T, B, H, masked)
    ours = value_and_gradients(kernel, arguments, dh)
    alike = value_and_gradients(partial(scan, rounded_product), arguments, dh)
    exact = value_and_gradients(
        partial(scan, partial(jnp.matmul, precision="highest")), arguments, dh
    )
    found = {}
    names = ("h", "dUzr", "dUn", "dh0", "da")
    for name, x, y, z in zip(names, *map(jax.device_get, (ours, alike, exact)), strict=True):
        near, far = abs(x - y) / np.abs(z).max(), abs(x - z) / np.abs(z).max()
        found[name] = near.mean(), near.max(), far.mean(), far.max()
    return found


def assert_twenty_equal_runs(kernel, B, H):
    """A kernel has no atomic sums: two runs that differ in any bit show a race."""
    arguments, dh = problem(128, B, H, masked=True)
    runs = [jax.device_get(value_and_gradients(kernel, arguments, dh)) for _ in range(20)]
    for run in runs[1:]:
        chex.assert_trees_all_equal(run, runs[0])
