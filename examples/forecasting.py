"""Forecast a series of measurements one step ahead, and keep the state between measurements.

    python examples/forecasting.py
    python examples/forecasting.py --hidden-dim 64 --steps 1000

The series is the monthly temperature of the Pacific off Peru from 1950 to 2010 (El Niño), from the
package statsmodels. The model reads a month and forecasts the next one. It learns from the first 50
years, and is tested on the last 11 in the way it would be used: `step` takes each new month and the
carry that was kept, and returns the next carry and an output, from which the head computes the
forecast. Nothing from the past is read again. For comparison, the same model is also tested with a
state that is reset every month.

Two other forecasts need no model: the last month's temperature (persistence), and that of the same
month a year ago (seasonal). The third is a linear regression on the last 12 months.

It needs Optax and statsmodels: `pip install optax statsmodels`.
"""

import argparse
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from statsmodels.datasets import elnino

import jaxgru


class Settings(NamedTuple):
    """The model's size, and how it is trained."""

    hidden_dim: int = 32
    steps: int = 500
    batch_size: int = 32
    window: int = 60
    learning_rate: float = 1e-2
    seed: int = 0


TEST_MONTHS = 11 * 12


def temperatures() -> np.ndarray:
    """Return the temperature of each month, in °C."""
    return elnino.load_pandas().data.iloc[:, 1:].to_numpy(np.float32).ravel()


def init(key: jax.Array, hidden_dim: int) -> dict[str, Any]:
    """Draw a layer. The head starts as zeros, so the model's first forecasts are persistence."""
    return {"gru": jaxgru.init_gru(key, 1, hidden_dim), "head": jnp.zeros(hidden_dim)}


def forecasts(params: dict[str, Any], series: jax.Array, reset: jax.Array | None = None):
    """Return the forecast after each step of some series (B, T), and the carry after the last."""
    y, carry = jaxgru.unroll(params["gru"], series[..., None], reset=reset)
    return series + y @ params["head"], carry


@jax.jit
def forecast(params: dict[str, Any], observed: jax.Array, carry: jax.Array):
    """Take one new observation (B,) of each series; return the next one's forecast, the carry."""
    y, carry = jaxgru.step(params["gru"], observed[:, None], carry)
    return observed + y @ params["head"], carry


def train(series: jax.Array, s: Settings) -> dict[str, Any]:
    """Train on random windows of a series (T,)."""
    init_key, key = jax.random.split(jax.random.key(s.seed))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(s.learning_rate, s.steps)),
    )

    def loss(params: dict[str, Any], windows: jax.Array) -> jax.Array:
        expected, _ = forecasts(params, windows[:, :-1])
        return jnp.mean((expected - windows[:, 1:]) ** 2)

    def step(state: tuple, key: jax.Array) -> tuple[tuple, None]:
        params, moments = state
        starts = jax.random.randint(key, (s.batch_size, 1), 0, len(series) - s.window)
        gradient = jax.grad(loss)(params, series[starts + jnp.arange(s.window + 1)])
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), None

    params = init(init_key, s.hidden_dim)
    state = params, optimizer.init(params)
    keys = jax.random.split(key, s.steps)
    (params, _), _ = jax.jit(partial(jax.lax.scan, step))(state, keys)
    return params


def linear(series: np.ndarray, last: int, lags: int = 12) -> np.ndarray:
    """Return the forecasts of the last months by the ones before, fitted to all earlier months."""
    windows = np.lib.stride_tricks.sliding_window_view(series, lags + 1)
    x = np.c_[windows[:, :-1], np.ones(len(windows))]
    y = windows[:, -1]
    weights, *_ = np.linalg.lstsq(x[:-last], y[:-last])
    return x[-last:] @ weights


def month_by_month(params: dict[str, Any], series: jax.Array) -> tuple[np.ndarray, float]:
    """Return the forecasts of the last months of a series (T,), and of the month after it."""
    of_past, carry = forecasts(params, series[None, :-TEST_MONTHS])  # the past is read once
    expected = of_past[:, -1]
    months = []
    for observed in series[-TEST_MONTHS:]:
        months.append(expected.item())
        expected, carry = forecast(params, observed[None], carry)  # one month, and the carry
    return np.array(months), expected.item()


OPTIONS = {
    "hidden_dim": "size of the memory",
    "steps": "training steps",
    "batch_size": "windows in a step",
    "window": "months of a window",
    "learning_rate": "AdamW's learning rate, which falls to 0",
    "seed": "seed of the weights and the windows",
}


def main() -> None:
    """Parse the arguments, train, forecast month by month, and print the errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in OPTIONS.items():
        default = getattr(Settings(), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N",
            help=f"{text} ({default})",
        )
    s = Settings(**vars(parser.parse_args()))

    celsius = temperatures()
    past = celsius[:-TEST_MONTHS]
    new = celsius[-TEST_MONTHS:]
    mean = past.mean()
    std = past.std()
    series = jnp.array((celsius - mean) / std)
    print(f"training on {len(past)} months, {s.steps:,} steps", flush=True)
    params = train(series[:-TEST_MONTHS], s)

    months, next_month = month_by_month(params, series)
    every_month = jnp.ones((1, len(series)), bool)
    with_reset, _ = forecasts(params, series[None], every_month)

    rivals = {
        "the last month": celsius[-TEST_MONTHS - 1 : -1],
        "the same month a year ago": celsius[-TEST_MONTHS - 12 : -12],
        "linear in the last 12 months": linear(celsius, TEST_MONTHS),
        "GRU, state reset every month": np.array(with_reset[0, -TEST_MONTHS - 1 : -1]) * std + mean,
        "GRU, state kept": months * std + mean,
    }
    print(f"the next month, which was not measured: {next_month * std + mean:.1f} °C")
    print(f"forecasts of the next month, {TEST_MONTHS} months: root mean square error")
    for name, expected in rivals.items():
        error = np.sqrt(np.mean((expected - new) ** 2))
        print(f"  {name:<28}  {error:.2f} °C")


if __name__ == "__main__":
    main()
