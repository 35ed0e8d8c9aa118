"""Train a recurrent policy with PPO on a task that needs memory, all in JAX.

    python examples/recurrent_ppo.py
    python examples/recurrent_ppo.py --rnn jaxgru flax --hidden-dim 512
    python examples/recurrent_ppo.py --rnn jaxgru --layer lstm --init-scheme pytorch --delay 40

The script trains three policies in turn, and prints how many times as fast jaxgru is as Flax.
`jaxgru` acts with `jaxgru.step` and learns with `jaxgru.unroll(..., reset=starts)`, because an
episode may start anywhere inside a sequence. `flax` runs a `flax.linen.GRUCell` under `nn.scan`,
like the `ScannedRNN` of PureJaxRL, and starts as the same function. `none` is without memory.

The task is the memory chain of bsuite (Osband et al. 2020, arXiv 1908.03568, "memory length"). Only
the first step shows a sign. The reward is 1 if the action of the last step equals the sign, and −1
otherwise. A policy without memory is right half of the time, so its mean return is 0.

PPO is that of Schulman et al. 2017 (arXiv 1707.06347), with the generalised advantage estimates of
Schulman et al. 2016 (arXiv 1506.02438). As in PureJaxRL, the environment, the policy and its
training are one program. A minibatch consists of whole sequences of some environments.

It needs Flax and Optax: `pip install flax optax`.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxgru
from jaxgru.libraries.flax_linen import from_linen

# --- The environment


class State(NamedTuple):
    """The step of the episode, from 0 on, and the sign (±1) that is shown in step 0."""

    step: jax.Array
    sign: jax.Array


def new_episode(key: jax.Array) -> State:
    """Start an episode with a random sign."""
    return State(jnp.int32(0), jax.random.rademacher(key, (), jnp.float32))


def observe(state: State, delay: int) -> jax.Array:
    """Return the observation: the sign (0 after step 0), whether to answer, the time left."""
    sign = jnp.where(state.step == 0, state.sign, 0)
    is_last = state.step == delay
    return jnp.stack([sign, is_last, 1 - state.step / delay])


def act(key: jax.Array, state: State, action: jax.Array, delay: int) -> tuple[State, Any, Any]:
    """Return the next state, the reward, and whether a new episode has started."""
    done = state.step == delay
    reward = jnp.where(done, state.sign * (2 * action - 1), 0.0)
    after = State(state.step + 1, state.sign)
    after = jax.tree.map(partial(jnp.where, done), new_episode(key), after)
    return after, reward, done


# --- The policy: a dense layer, a recurrent one, and heads for two actions and for the value


class RNN(NamedTuple):
    """A recurrent layer. `starts` says where an episode starts: the carry is reset before.

    A carry is (B, H), and of an LSTM two of these.
    """

    init: Callable  # (key, features, hidden_dim) -> parameters
    step: Callable  # (parameters, x (B, F), carry, starts (B,)) -> y (B, H), carry
    unroll: Callable  # (parameters, x (T, B, F), carry, starts (T, B)) -> y (T, B, H), carry


class ScannedRNN(nn.Module):
    """The usual way to run a Flax cell with resets."""

    @partial(
        nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False}
    )
    @nn.compact
    def __call__(self, carry, inputs):
        """Reset the carry where an episode starts, then compute one step of the cell."""
        x, starts = inputs
        carry = jnp.where(starts[:, None], 0, carry)
        return nn.GRUCell(carry.shape[-1])(carry, x)


def init_flax(key: jax.Array, features: int, hidden_dim: int) -> Any:
    """Draw the parameters of a `ScannedRNN`."""
    inputs = jnp.zeros((1, 1, features)), jnp.zeros((1, 1), bool)
    return ScannedRNN().init(key, jnp.zeros((1, hidden_dim)), inputs)


def init_gru(key: jax.Array, features: int, hidden_dim: int) -> jaxgru.GRUCell:
    """Draw what Flax draws, so that both policies start as the same function.

    Without Flax, `jaxgru.init_gru(key, features, hidden_dim)` draws from the same distributions.
    """
    return from_linen(init_flax(key, features, hidden_dim)["params"]["GRUCell_0"])


def unroll_flax(params: Any, x: jax.Array, carry: jax.Array, starts: jax.Array) -> tuple[Any, Any]:
    """Run a `ScannedRNN`."""
    carry, y = ScannedRNN().apply(params, carry, (x, starts))
    return y, carry


def step_flax(params: Any, x: jax.Array, carry: jax.Array, starts: jax.Array) -> tuple[Any, Any]:
    """Run a `ScannedRNN` for one step."""
    y, carry = unroll_flax(params, x[None], carry, starts[None])
    return y[0], carry


def dense(key: jax.Array, inputs: int, outputs: int) -> tuple[jax.Array, jax.Array]:
    """Draw the weights and biases of a dense layer."""
    return jax.nn.initializers.lecun_normal()(key, (inputs, outputs)), jnp.zeros(outputs)


def no_memory(p: tuple, x: jax.Array, carry: jax.Array, starts: jax.Array) -> tuple[Any, Any]:
    """Compute a dense layer in place of a recurrent one."""
    W, b = p
    return jnp.tanh(x @ W + b), carry


def step_jaxgru(p: Any, x: jax.Array, carry: Any, starts: jax.Array) -> tuple[Any, Any]:
    """Run a layer of jaxgru for one step."""
    return jaxgru.step(p, x, carry, reset=starts)


def unroll_jaxgru(p: Any, x: jax.Array, carry: Any, starts: jax.Array) -> tuple[Any, Any]:
    """Run a layer of jaxgru."""
    return jaxgru.unroll(p, x, carry, reset=starts, time_major=True)


RNNS = {
    "jaxgru": RNN(init_gru, step_jaxgru, unroll_jaxgru),
    "flax": RNN(init_flax, step_flax, unroll_flax),
    "none": RNN(dense, no_memory, no_memory),
}
LAYERS = {"gru": jaxgru.init_gru, "lstm": jaxgru.init_lstm, "rnn": jaxgru.init_rnn}


def init_policy(key: jax.Array, rnn: RNN, hidden_dim: int) -> dict[str, Any]:
    """Draw the parameters of a policy for 3 observed numbers and 2 actions."""
    keys = jax.random.split(key, 3)
    weights, biases = dense(keys[2], hidden_dim, 3)
    return {
        "encoder": dense(keys[0], 3, hidden_dim),
        "rnn": rnn.init(keys[1], hidden_dim, hidden_dim),
        "heads": (0.01 * weights, biases),
    }


def policy(
    params: dict[str, Any], rnn: Callable, x: jax.Array, carry: Any, starts: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """Return log-probabilities of the actions, the value, and the next carry.

    rnn is `RNN.step` for x (B, 3), or `RNN.unroll` for x (T, B, 3).
    """
    W, b = params["encoder"]
    y, carry = rnn(params["rnn"], nn.relu(x @ W + b), carry, starts)
    W, b = params["heads"]
    out = y @ W + b
    log_p = jax.nn.log_softmax(out[..., :2])
    value = out[..., 2]
    return log_p, value, carry


# --- PPO


class Settings(NamedTuple):
    """The sizes of a training (`OPTIONS` says what they are), and PPO's numbers."""

    delay: int = 15
    updates: int = 40
    num_envs: int = 32
    num_steps: int = 128
    hidden_dim: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.99
    lambda_: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    max_grad_norm: float = 0.5


class Rollout(NamedTuple):
    """What the policy saw and did, each (T, B, ...)."""

    x: jax.Array
    starts: jax.Array  # an episode starts with this x
    action: jax.Array
    log_p: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


class Actors(NamedTuple):
    """The environments, the policy's memory of each, and where an episode starts now."""

    state: State
    carry: Any
    starts: jax.Array


def new_actors(key: jax.Array, params: Any, s: Settings) -> Actors:
    """Start an episode in every environment."""
    state = jax.vmap(new_episode)(jax.random.split(key, s.num_envs))
    carry = jnp.zeros((s.num_envs, s.hidden_dim))
    if isinstance(params["rnn"], jaxgru.cells.Cell):
        carry = jaxgru.initial_carry(params["rnn"], s.num_envs)
    return Actors(state, carry, jnp.ones(s.num_envs, bool))


def rollout(
    params: dict[str, Any], rnn: RNN, key: jax.Array, actors: Actors, s: Settings
) -> tuple[Actors, Rollout, jax.Array]:
    """Let the policy act for some steps; return also the value of the state after them."""

    def step(actors: Actors, key: jax.Array) -> tuple[Actors, Rollout]:
        for_action, for_envs = jax.random.split(key)
        state, carry, starts = actors
        x = jax.vmap(partial(observe, delay=s.delay))(state)
        log_p, value, carry = policy(params, rnn.step, x, carry, starts)
        action = jax.random.categorical(for_action, log_p)
        keys = jax.random.split(for_envs, s.num_envs)
        state, reward, done = jax.vmap(partial(act, delay=s.delay))(keys, state, action)
        log_p = jnp.take_along_axis(log_p, action[:, None], 1)[:, 0]
        return Actors(state, carry, done), Rollout(x, starts, action, log_p, value, reward, done)

    actors, steps = jax.lax.scan(step, actors, jax.random.split(key, s.num_steps))
    x = jax.vmap(partial(observe, delay=s.delay))(actors.state)
    _, value, _ = policy(params, rnn.step, x, actors.carry, actors.starts)
    return actors, steps, value


def advantages(steps: Rollout, last_value: jax.Array, s: Settings) -> jax.Array:
    """Compute Â_t = δ_t + γλ Â_{t+1} with δ_t = r_t + γ V_{t+1} − V_t, within episodes."""

    def step(later: tuple, now: Rollout) -> tuple[tuple, jax.Array]:
        advantage, value = later
        discount = s.gamma * (1 - now.done)
        advantage = now.reward + discount * (value + s.lambda_ * advantage) - now.value
        return (advantage, now.value), advantage

    zeros = jnp.zeros_like(last_value)
    _, all_advantages = jax.lax.scan(step, (zeros, last_value), steps, reverse=True)
    return all_advantages


def ppo_loss(
    params: dict[str, Any],
    rnn: RNN,
    carry: Any,
    steps: Rollout,
    advantage: jax.Array,
    s: Settings,
) -> jax.Array:
    """Compute the clipped surrogate loss + ½ the value's squared error − the entropy bonus."""
    log_p, value, _ = policy(params, rnn.unroll, steps.x, carry, steps.starts)
    log_p_of_action = jnp.take_along_axis(log_p, steps.action[..., None], -1)[..., 0]
    ratio = jnp.exp(log_p_of_action - steps.log_p)
    clipped_ratio = jnp.clip(ratio, 1 - s.clip, 1 + s.clip)
    weight = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = jnp.minimum(ratio * weight, clipped_ratio * weight)
    error = (value - (advantage + steps.value)) ** 2
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return -surrogate.mean() + 0.5 * error.mean() - s.entropy * entropy.mean()


def train(
    params: dict[str, Any], key: jax.Array, rnn: RNN, s: Settings
) -> tuple[dict[str, Any], jax.Array]:
    """Train a policy; return its parameters, and the mean return of each update's episodes."""
    env_key, key = jax.random.split(key)
    optimizer = optax.chain(
        optax.clip_by_global_norm(s.max_grad_norm), optax.adam(s.learning_rate, eps=1e-5)
    )

    def minibatch(state: tuple, batch: tuple) -> tuple[tuple, None]:
        params, opt_state = state
        gradient = jax.grad(ppo_loss)(params, rnn, *batch, s)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def update(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state, actors = state
        keys = jax.random.split(key, 1 + s.epochs)
        carry = actors.carry  # before the rollout
        actors, steps, last_value = rollout(params, rnn, keys[0], actors, s)
        batch = steps, advantages(steps, last_value, s)

        def epoch(state: tuple, key: jax.Array) -> tuple[tuple, None]:
            order = jax.random.permutation(key, s.num_envs).reshape(s.minibatches, -1)
            batches = jax.tree.map(lambda a: jnp.moveaxis(a[:, order], 1, 0), batch)
            carries = jax.tree.map(lambda h: h[order], carry)
            return jax.lax.scan(minibatch, state, (carries, *batches))

        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), keys[1:])
        return (params, opt_state, actors), steps.reward.sum() / steps.done.sum()

    state = params, optimizer.init(params), new_actors(env_key, params, s)
    (params, _, _), returns = jax.lax.scan(update, state, jax.random.split(key, s.updates))
    return params, returns


# --- The command


OPTIONS = {
    "delay": "steps from the sign to the answer",
    "updates": "how often the policy acts and learns",
    "num_envs": "environments side by side, in 4 minibatches",
    "num_steps": "steps of each environment between two updates",
    "hidden_dim": "size of the memory",
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rnn",
        nargs="+",
        choices=RNNS,
        default=[*RNNS],
        metavar="NAME",
        help=f"which to train: {' '.join(RNNS)} (all)",
    )
    parser.add_argument(
        "--layer",
        choices=LAYERS,
        help="jaxgru's policy has this layer, with jaxgru's weights",
    )
    parser.add_argument(
        "--init-scheme",
        choices=("orthogonal", "pytorch"),
        default="orthogonal",
        help="initial weights of --layer (orthogonal)",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="train each with seeds 0, 1, … (3)"
    )
    for name, text in OPTIONS.items():
        default = getattr(Settings(), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            metavar="N",
            help=f"{text} ({default})",
        )
    return parser


def settings() -> tuple[dict[str, RNN], int, Settings]:
    """Parse the arguments: which policies, how many seeds, and the settings."""
    parser = make_parser()
    arguments = parser.parse_args()
    s = Settings(**{name: getattr(arguments, name) for name in OPTIONS})
    for name in ("seeds", *OPTIONS):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be above 0.")
    if s.num_envs % s.minibatches:
        parser.error(f"--num-envs must be a multiple of {s.minibatches}, the minibatches.")
    if s.num_steps <= s.delay:
        parser.error("--num-steps must be above --delay, or no episode ends.")
    rnns = {name: RNNS[name] for name in arguments.rnn}
    if arguments.layer and "jaxgru" in rnns:
        init = partial(LAYERS[arguments.layer], init_scheme=arguments.init_scheme)
        rnns["jaxgru"] = rnns["jaxgru"]._replace(init=init)
    return rnns, arguments.seeds, s


def main() -> None:
    """Train the policies in turn, and print what they learned and how long it took."""
    rnns, seeds, s = settings()
    inits = {}
    programs = {}
    for name, rnn in rnns.items():
        inits[name] = jax.jit(partial(init_policy, rnn=rnn, hidden_dim=s.hidden_dim))
        shapes = jax.eval_shape(inits[name], jax.random.key(0))
        program = jax.jit(partial(train, rnn=rnn, s=s))
        programs[name] = program.lower(shapes, jax.random.key(0)).compile()
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        print(f"{name:<6} has {count:,} parameters")

    seconds = {name: [] for name in rnns}
    for seed in range(seeds):
        init_key, key = jax.random.split(jax.random.key(seed))
        for name, program in programs.items():  # in turn, for a fair comparison
            params = jax.block_until_ready(inits[name](init_key))
            start = time.perf_counter()
            _, returns = jax.block_until_ready(program(params, key))
            seconds[name].append(time.perf_counter() - start)
            parts = [part for part in np.array_split(returns, 10) if part.size]
            curve = " ".join(f"{part.mean():+.2f}" for part in parts)
            print(f"{name:<6} seed {seed}: {seconds[name][-1]:5.1f} s, mean return {curve}")

    if {"jaxgru", "flax"} <= {*rnns}:
        ratios = np.divide(seconds["flax"], seconds["jaxgru"])
        print(
            f"The whole training is {np.median(ratios):.2f} times as fast with jaxgru as with flax "
            f"(the median of {seeds}; {ratios.min():.2f} to {ratios.max():.2f})."
        )


if __name__ == "__main__":
    main()
