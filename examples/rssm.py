"""Learn a world model with discrete latents (RSSM) from observations, and imagine with it.

    python examples/rssm.py
    python examples/rssm.py --updates 5000 --figure imagined.svg

A ball moves between two walls, slowly or fast. A wall returns it at either speed, by chance. A tap
turns it around. The agent taps at random and sees where the ball is, through noise, but neither its
speed nor its direction. Episodes end anywhere in a sequence.

The recurrent state-space model of PlaNet (Hafner et al. 2018, arXiv 1811.04551) and DreamerV3
(Hafner et al. 2023, arXiv 2301.04104) computes h and samples z in each step:

    h' = core(h, z, action)       z ~ posterior(h, x), or z ~ prior(h)       x ≈ decoder(h, z)

The prior learns to foretell z without x, and so it can imagine what follows. The core reads the z
of the step before, so its inputs are not known for all steps at once. Therefore a `lax.scan` of
`jaxgru.step` takes the place of `jaxgru.unroll`. The core, z and the balance of the two divergences
are DreamerV3's. Its free bits, which did not help here, are left out.

It needs Optax and Matplotlib: `pip install optax matplotlib`.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.nn import sigmoid, standardize
from matplotlib.figure import Figure

import jaxgru
from jaxgru.cells import Cell, struct

VELOCITIES = jnp.array([-0.15, -0.05, 0.05, 0.15])
NOISE = 0.1  # standard deviation of what is seen
TAPS = 0.05  # how often the agent taps
ENDS = 0.03  # how often an episode ends

# z consists of 8 choices, each of one class among 8.
GROUPS = 8
CLASSES = 8

# Steps observed and imagined in a test, and how often they are imagined.
PAST = 20
FUTURE = 20
SAMPLES = 16


class Step(NamedTuple):
    """The action, the observation after it, and where the ball is, each (T, B)."""

    action: jax.Array
    x: jax.Array
    starts: jax.Array  # an episode starts with this x
    position: jax.Array


class State(NamedTuple):
    """The last action, whether an episode starts now, and the ball, each (B,)."""

    action: jax.Array
    starts: jax.Array
    position: jax.Array
    velocity: jax.Array


def play(key: jax.Array, B: int, T: int, ends: float = ENDS) -> Step:
    """Return the first steps of some worlds."""

    def step(state: State, key: jax.Array) -> tuple[State, Step]:
        action, starts, position, velocity = state
        keys = jax.random.split(key, 4)
        first_velocity, velocity_after_wall = jax.random.choice(keys[0], VELOCITIES, (2, B))
        first_position = jax.random.uniform(keys[1], (B,), minval=-1)
        position = jnp.where(starts, first_position, position)
        velocity = jnp.where(starts, first_velocity, velocity)
        x = position + NOISE * jax.random.normal(keys[2], (B,))
        tap, done = jax.random.uniform(keys[3], (2, B)) < jnp.array([[TAPS], [ends]])

        velocity = jnp.where(tap, -velocity, velocity)
        next_position = position + velocity
        wall = jnp.clip(next_position, -1, 1)  # or the position, between the walls
        velocity = jnp.where(next_position == wall, velocity, -wall * abs(velocity_after_wall))
        next_position = 2 * wall - next_position  # thrown back by the wall
        after = State(tap.astype(float), done, next_position, velocity)
        return after, Step(action, x, starts, position)

    state = State(jnp.zeros(B), jnp.ones(B, bool), jnp.zeros(B), jnp.zeros(B))
    _, steps = jax.lax.scan(step, state, jax.random.split(key, T))
    return steps


@struct
class DreamerCell(Cell):
    """DreamerV3's core without groups; docs/guide/custom_cell.md explains it, and has them."""

    W: jax.Array  # (H + E, 3H)
    gain: jax.Array  # (3H,)
    b: jax.Array  # (3H,)

    def sizes(self):
        H = len(self.b) // 3
        return len(self.W) - H, H

    def step(self, layout, h, x):
        a = jnp.concatenate([h, x], axis=-1) @ self.W
        a = standardize(a, epsilon=1e-3) * self.gain + self.b
        reset, candidate, update = jnp.split(a, 3, axis=-1)
        candidate = jnp.tanh(sigmoid(reset) * candidate)
        update = sigmoid(update - 1)
        return update * candidate + (1 - update) * h


def init(key: jax.Array, H: int) -> dict[str, Any]:
    """Draw the parameters: the core's, and those of networks with one hidden layer."""
    keys = jax.random.split(key, 7)
    Z = GROUPS * CLASSES
    normal = jax.nn.initializers.lecun_normal()
    W = normal(keys[0], (H + Z + 1, 3 * H))
    return {
        "core": DreamerCell(W, jnp.ones(3 * H), jnp.zeros(3 * H)),
        "prior": (normal(keys[1], (H, H)), normal(keys[2], (H, Z))),
        "posterior": (normal(keys[3], (H + 1, H)), normal(keys[4], (H, Z))),
        "decoder": (normal(keys[5], (H + Z, H)), normal(keys[6], (H, 1))),
    }


def network(weights: tuple, *inputs: jax.Array) -> jax.Array:
    """Compute a network of two layers, without biases."""
    W, V = weights
    return jax.nn.silu(jnp.concatenate(inputs, axis=-1) @ W) @ V


def log_p(weights: tuple, *inputs: jax.Array) -> jax.Array:
    """Return the log-probabilities of z (…, groups, classes), 1 % of which is uniform."""
    logits = network(weights, *inputs)
    p = jax.nn.softmax(logits.reshape(*logits.shape[:-1], GROUPS, CLASSES))
    return jnp.log(0.99 * p + 0.01 / CLASSES)


def step(params: dict, state: tuple, key: jax.Array, action: jax.Array, x=None, starts=None):
    """Return h and z after an action, and log p of z: the posterior with x, the prior without.

    Where an episode starts, the core reads zeros in place of h, z and the action.
    """
    h, z = state
    inputs = jnp.concatenate([z, action[:, None]], axis=-1)
    if starts is not None:
        inputs = jnp.where(starts[:, None], 0, inputs)
    h, _ = jaxgru.step(params["core"], inputs, h, reset=starts)
    if x is None:
        log_p_z = log_p(params["prior"], h)
    else:
        log_p_z = log_p(params["posterior"], h, x[:, None])
    p = jnp.exp(log_p_z)
    sample = jax.nn.one_hot(jax.random.categorical(key, log_p_z), CLASSES)
    z = (sample + p - jax.lax.stop_gradient(p)).reshape(z.shape)  # the gradient is that of p
    return (h, z), (h, z, log_p_z)


def observe(params: dict, steps: Step, keys: jax.Array) -> tuple[jax.Array, ...]:
    """Return h, z and log p of each step (T, B, …), as the posterior draws them."""
    B = steps.x.shape[1]
    zeros = jaxgru.initial_carry(params["core"], B), jnp.zeros((B, GROUPS * CLASSES))
    inputs = keys, steps.action, steps.x, steps.starts
    _, outputs = jax.lax.scan(lambda state, now: step(params, state, *now), zeros, inputs)
    return outputs


def imagine(params: dict, state: tuple, actions: jax.Array, keys: jax.Array) -> tuple:
    """Return h, z and log p after each of some actions (T, B), as the prior draws them."""
    inputs = keys, actions
    _, outputs = jax.lax.scan(lambda state, now: step(params, state, *now), state, inputs)
    return outputs


def kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Return the divergence of q from p, over all groups of z."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum((-2, -1))


def loss_fn(params: dict, steps: Step, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the loss, and the decoder's squared error in units of the noise."""
    h, z, posterior = observe(params, steps, jax.random.split(key, len(steps.x)))
    prior = log_p(params["prior"], h)
    learned_by_prior = kl(jax.lax.stop_gradient(posterior), prior)
    learned_by_posterior = kl(posterior, jax.lax.stop_gradient(prior))
    divergence = learned_by_prior + 0.1 * learned_by_posterior
    x = network(params["decoder"], h, z)[..., 0]
    error = jnp.square((x - steps.x) / NOISE).mean()
    return error / 2 + divergence.mean(), error


def train(key: jax.Array, updates: int, hidden_dim: int = 64) -> dict[str, Any]:
    """Return the parameters after updates on 16 sequences of 40 steps each, which are all new."""
    keys = jax.random.split(key)
    learning_rate = optax.cosine_decay_schedule(3e-3, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(learning_rate))

    def update(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, moments = state
        keys = jax.random.split(key)
        steps = play(keys[0], 16, 40)
        gradient, error = jax.grad(loss_fn, has_aux=True)(params, steps, keys[1])
        changes, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, changes), moments), error

    params = init(keys[0], hidden_dim)
    moments = optimizer.init(params)
    run = jax.jit(partial(jax.lax.scan, update))
    update_keys = jax.random.split(keys[1], updates)
    size = max(updates // 5, 1)
    for i in range(0, updates, size):
        (params, moments), errors = run((params, moments), update_keys[i : i + size])
        print(f"update {i + len(errors):5}  error² / noise² {errors.mean():5.2f}", flush=True)
    return params


@jax.jit
def futures(params: dict, world: Step, key: jax.Array) -> jax.Array:
    """Return positions (FUTURE, B, SAMPLES) as imagined after the first PAST observations."""
    keys = jax.random.split(key)
    past = jax.tree.map(lambda a: a[:PAST], world)
    h, z, _ = observe(params, past, jax.random.split(keys[0], PAST))
    last = jnp.repeat(h[-1], SAMPLES, axis=0), jnp.repeat(z[-1], SAMPLES, axis=0)
    actions = jnp.repeat(world.action[PAST:], SAMPLES, axis=1)
    h, z, _ = imagine(params, last, actions, jax.random.split(keys[1], FUTURE))
    return network(params["decoder"], h, z).reshape(FUTURE, -1, SAMPLES)


def draw(figure: Figure, world: Step, imagined: jax.Array) -> None:
    """Draw three worlds."""
    figure.suptitle("Observed (dots), true (thick) and imagined positions")
    steps = jnp.arange(1 - PAST, FUTURE + 1)
    for b, axes in enumerate(figure.subplots(3, sharex=True, sharey=True)):
        axes.plot(steps[PAST:], imagined[:, b], color="#0969da", linewidth=0.7)
        axes.plot(steps, world.position[:, b], color="#1f2328")
        axes.plot(steps[:PAST], world.x[:PAST, b], "o", color="#bc4c00", markersize=3)
    axes.set_xlabel("steps after the last observation")
    figure.supylabel("position", size="medium")


def options() -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = partial(parser.add_argument, type=int, metavar="N")
    add("--updates", default=2000, help="training steps (2000)")
    add("--seed", default=0, help="seed of the weights, the worlds and the samples (0)")
    add(
        "--figure",
        type=str,
        metavar="PATH",
        help="an .svg or .png of observed, true and imagined balls",
    )
    arguments = parser.parse_args()
    if arguments.updates < 1:
        parser.error("--updates must be above 0.")
    if not 0 <= arguments.seed < 2**32:
        parser.error("--seed must be from 0 to 2³² − 1.")
    figure = arguments.figure
    if figure is not None:
        if not figure.endswith((".svg", ".png")):
            parser.error(f"--figure is {figure}; it must end in .svg or .png.")
        if not os.access(Path(figure).parent, os.W_OK):
            parser.error(f"--figure is {figure}, and no file can be created there.")
    return arguments


def main() -> None:
    """Train, and compare imagined balls with true ones."""
    arguments = options()
    keys = jax.random.split(jax.random.key(arguments.seed), 3)
    params = train(keys[0], arguments.updates)

    world = play(keys[1], 500, PAST + FUTURE, ends=0)
    imagined = futures(params, world, keys[2])
    always_reset = world._replace(starts=jnp.ones_like(world.starts))
    imagined_with_resets = futures(params, always_reset, keys[2])
    means = {
        "the last observation": world.x[PAST - 1],
        "imagined, reset at each observation": imagined_with_resets.mean(-1),
        "imagined": imagined.mean(-1),
    }
    print("root mean square error of the position, 1, 2, 5, 10 and 20 steps later, in 500 worlds:")
    for name, mean in means.items():
        errors = jnp.sqrt(jnp.square(mean - world.position[PAST:]).mean(1))
        print(f"  {name:<35}", *(f"{errors[k - 1]:.2f}" for k in (1, 2, 5, 10, 20)), sep="  ")
    if arguments.figure:
        figure = Figure(figsize=(5.2, 5), layout="constrained")
        draw(figure, world, imagined)
        figure.savefig(arguments.figure)


if __name__ == "__main__":
    main()
