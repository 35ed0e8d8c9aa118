"""The cells' equations in NumPy, for one row: an independent check of all that jaxgru does.

A layer p comes as `numbers`. m is the mask of variational dropout with its scale: it multiplies h
in the products alone (Gal & Ghahramani 2016, equation 8, and its like for the other cells).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from random_models import by_gate


def sigma(a):
    return 1 / (1 + np.exp(-a))


def block_diagonal(U):
    """The matrix (H, H) of blocks (n, k, k), entry by entry; a matrix is itself."""
    if U.ndim == 2:
        return U
    n, k, _ = U.shape
    matrix = np.zeros((n * k, n * k))
    for i, row, column in np.ndindex(U.shape):
        matrix[i * k + row, i * k + column] = U[i, row, column]
    return matrix


def relu(a):
    return np.maximum(a, 0)


def numbers(layer) -> SimpleNamespace:
    """A layer's weights in float64, gate by gate, blocks as a matrix; phi is its activation."""
    no_second_biases = {"cz": 0, "cr": 0}  # as in Mogrifier
    parts = {}
    for name, part in (no_second_biases | vars(by_gate(layer))).items():
        parts[name] = np.asarray(part, np.float64)
        if name[0] in "UW" and len(name) == 2:
            parts[name] = block_diagonal(parts[name])
    has_relu = getattr(layer, "activation", "tanh") == "relu"
    return SimpleNamespace(**parts, phi=relu if has_relu else np.tanh)


def gru(p, h, x, m=1, state=None):
    """With cn, the reset gate comes after the product. state: what z keeps, if that is not h."""
    if state is None:
        state = h
    z = sigma(x @ p.Wz + (m * h) @ p.Uz + p.bz + p.cz)
    r = sigma(x @ p.Wr + (m * h) @ p.Ur + p.br + p.cr)
    if hasattr(p, "cn"):
        n = p.phi(x @ p.Wn + r * ((m * h) @ p.Un + p.cn) + p.bn)
    else:
        n = p.phi(x @ p.Wn + (m * r * h) @ p.Un + p.bn)
    return (1 - z) * state + z * n


def lstm(p, carry, x, m=1):
    h, c = carry
    f = sigma(x @ p.Wf + (m * h) @ p.Uf + p.bf)
    i = sigma(x @ p.Wi + (m * h) @ p.Ui + p.bi)
    o = sigma(x @ p.Wo + (m * h) @ p.Uo + p.bo)
    c = f * c + i * p.phi(x @ p.Wg + (m * h) @ p.Ug + p.bg)
    return o * p.phi(c), c


def mogrifier(p, h, x, m=1):
    """Equations 1 and 2 of the paper (arXiv 1909.01792) before a GRU."""
    state = h
    for i in range(len(p.Qa) + len(p.Ra)):
        if i % 2 == 0:
            x = 2 * sigma((m * h) @ p.Qa[i // 2] @ p.Qb[i // 2]) * x
        else:
            h = 2 * sigma(x @ p.Ra[i // 2] @ p.Rb[i // 2]) * h
    return gru(p, h, x, m, state)
