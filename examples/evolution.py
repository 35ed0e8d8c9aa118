"""Evolve a recurrent policy on a task that needs memory, without a gradient of the policy.

    python examples/evolution.py
    python examples/evolution.py --pairs 500 --hidden-dim 64

A walker is told once, before it may move, whether its target is at −1 or at 1. From then on it sees
only its own position, and moves by at most 0.3 a step. Its reward is minus the distance to the
target, on average over the second half of an episode. Without memory it does the same for both
targets, so it gets −1 at best.

In each generation, the parameters are changed in many random directions, both ways, and each
policy of this population lives through some episodes. The parameters then move towards what did
better (evolution strategies: Salimans et al. 2017, arXiv 1703.03864). `jax.vmap` runs the
population: `jaxgru.step` of a thousand policies is a few batched products.

It needs Optax: `pip install optax`.
"""

import argparse
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import jaxgru


class Settings(NamedTuple):
    """The sizes, and the numbers of the evolution strategy."""

    hidden_dim: int = 16
    pairs: int = 128
    generations: int = 100
    episodes: int = 16
    steps: int = 30
    sigma: float = 0.1
    learning_rate: float = 0.05
    seed: int = 0


def init(key: jax.Array, hidden_dim: int) -> dict[str, Any]:
    """Draw a policy that sees two numbers, and stands still at first."""
    return {"gru": jaxgru.init_gru(key, 2, hidden_dim), "head": jnp.zeros(hidden_dim)}


def returns(params: dict[str, Any], target: jax.Array, steps: int) -> jax.Array:
    """Return the mean reward of an episode for each of some targets (B,)."""

    def step(state: tuple, t: jax.Array) -> tuple[tuple, jax.Array]:
        position, carry = state
        x = jnp.stack([jnp.where(t == 0, target, 0), position], axis=-1)
        y, carry = jaxgru.step(params["gru"], x, carry)
        position = position + 0.3 * (t > 0) * jnp.tanh(y @ params["head"])
        return (position, carry), -jnp.abs(position - target)

    start = jnp.zeros_like(target), jaxgru.initial_carry(params["gru"], len(target))
    _, rewards = jax.lax.scan(step, start, jnp.arange(steps))
    return rewards[steps // 2 :].mean(0)


def ranked(fitness: jax.Array) -> jax.Array:
    """Return ranks from −½ to ½ in place of values, so that outliers do not matter."""
    ranks = fitness.ravel().argsort().argsort().reshape(fitness.shape)
    return ranks / (fitness.size - 1) - 0.5


def evolve(s: Settings) -> tuple[dict[str, Any], jax.Array]:
    """Return the policy after all generations, and the mean reward of each."""
    init_key, key = jax.random.split(jax.random.key(s.seed))
    center, as_policy = ravel_pytree(init(init_key, s.hidden_dim))
    optimizer = optax.adam(s.learning_rate)

    def generation(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        center, moments = state
        for_changes, for_targets = jax.random.split(key)
        changes = s.sigma * jax.random.normal(for_changes, (s.pairs, center.size))
        targets = jax.random.rademacher(for_targets, (s.episodes,), jnp.float32)
        population = center + jnp.stack([changes, -changes])

        def fitness_of(policy: jax.Array) -> jax.Array:
            return returns(as_policy(policy), targets, s.steps).mean()

        fitness = jax.vmap(jax.vmap(fitness_of))(population)  # (2, pairs)
        ranks = ranked(fitness)
        uphill = (ranks[0] - ranks[1]) @ changes / (s.pairs * s.sigma)
        updates, moments = optimizer.update(-uphill, moments)
        return (optax.apply_updates(center, updates), moments), fitness.mean()

    keys = jax.random.split(key, s.generations)
    run = jax.jit(partial(jax.lax.scan, generation))
    (center, _), rewards = run((center, optimizer.init(center)), keys)
    return as_policy(center), rewards


OPTIONS = {
    "hidden_dim": "size of the memory",
    "pairs": "directions of change; the population is twice as large",
    "generations": "how often the parameters move",
    "episodes": "episodes of each policy in a generation",
    "steps": "steps of an episode",
    "sigma": "standard deviation of a change",
    "learning_rate": "Adam's learning rate",
    "seed": "seed of the weights, the changes and the targets",
}


def main() -> None:
    """Parse the arguments, evolve a policy, and print how its reward grew."""
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
    print(f"evolving {2 * s.pairs} policies in each of {s.generations} generations", flush=True)
    policy, rewards = evolve(s)
    for g in range(0, s.generations, max(s.generations // 10, 1)):
        print(f"generation {g:4}  mean reward of the population {rewards[g]:6.3f}")
    both = returns(policy, jnp.array([-1.0, 1.0]), s.steps)
    print(f"mean reward of the evolved policy {both.mean():.3f}; the best without memory: -1")


if __name__ == "__main__":
    main()
