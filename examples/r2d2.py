"""Learn from replayed pieces of episodes and the states stored with them (R2D2), all in JAX.

    python examples/r2d2.py
    python examples/r2d2.py --seeds 3 --burn-in 8

A replay buffer gives an agent pieces from the middle of episodes. To learn from a piece, the agent
needs the state before its first step. R2D2 (Kapturowski et al. 2019, "Recurrent experience replay
in distributed reinforcement learning") stores this state when the agent acts. Because the weights
have changed since, the first steps of a piece are only read, which brings the state up to date (the
burn-in). A simpler way is to start each piece from zeros. The script compares these ways.

The first step of an episode shows a symbol, and later steps show distractors. Now and then the
agent is asked for the first symbol, and gets a reward of 1 if it is right. A guess is right one
time in 4. Agents learn from pieces of 8 steps, in episodes of 100 steps on average. Then they play
episodes of 240 steps, and the script prints how often they are right, by the time since the symbol
was shown.

An agent that learned with stored states is right throughout. One that started each piece from zeros
forgets slowly; a burn-in from zeros makes it worse. On this task, the burn-in adds nothing to the
stored state.

The stored state, the burn-in and double Q-learning with a target network are those of R2D2. Its
other parts are left out: many machines, priorities, n-step targets, and rescaled values.

It needs Optax: `pip install optax`.
"""

import argparse
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxgru

SYMBOLS = 4


class Settings(NamedTuple):
    """The sizes of a training (`OPTIONS` says what the first ones are), and its numbers."""

    updates: int = 4000
    learned: int = 8
    burn_in: int = 4
    num_envs: int = 16
    hidden_dim: int = 64
    stored: bool = True  # or a piece begins with zeros
    capacity: int = 1000  # steps of each environment in the buffer; a multiple of `learned`
    batch_size: int = 32
    learning_rate: float = 3e-3
    gamma: float = 0.9
    epsilon: float = 0.05  # how often the agent acts at random
    target_every: int = 100  # updates between two copies to the target network
    ask: float = 0.2  # how often the agent is asked
    end: float = 0.01  # how often an episode ends


# --- The environment


class State(NamedTuple):
    """Whether an episode starts, its first symbol, the symbol shown now, whether to answer now."""

    starts: jax.Array
    first: jax.Array
    shown: jax.Array
    asked: jax.Array


def new_episode(key: jax.Array) -> State:
    """Show the symbol to remember."""
    symbol = jax.random.randint(key, (), 0, SYMBOLS)
    return State(jnp.array(True), symbol, symbol, jnp.array(False))


def observe(state: State) -> jax.Array:
    """Return the symbol shown (one of 4 is 1), whether it is the first, and whether to answer."""
    return jnp.array([*jax.nn.one_hot(state.shown, SYMBOLS), state.starts, state.asked])


def act(key: jax.Array, state: State, action: jax.Array, s: Settings) -> tuple[State, Any, Any]:
    """Return the next state, the reward, and whether this state is of a new episode."""
    keys = jax.random.split(key, 4)
    reward = jnp.where(state.asked & (action == state.first), 1.0, 0.0)
    done = jax.random.bernoulli(keys[0], s.end)
    shown = jax.random.randint(keys[1], (), 0, SYMBOLS)
    asked = jax.random.bernoulli(keys[2], s.ask)
    after = State(jnp.array(False), state.first, shown, asked)
    after = jax.tree.map(partial(jnp.where, done), new_episode(keys[3]), after)
    return after, reward, done


# --- The agent: a dense layer, a GRU, and a value for each action


def init(key: jax.Array, s: Settings) -> dict[str, Any]:
    """Draw the parameters."""
    keys = jax.random.split(key, 3)
    H = s.hidden_dim
    lecun = jax.nn.initializers.lecun_normal()
    return {
        "encoder": lecun(keys[0], (SYMBOLS + 2, H)),
        "gru": jaxgru.init_gru(keys[1], H, H),
        "head": lecun(keys[2], (H, SYMBOLS)),
    }


def q_step(params: dict[str, Any], x: jax.Array, carry: Any, starts: jax.Array) -> tuple[Any, Any]:
    """Return the value of each action for x (B, 6), and the next carry."""
    y = jax.nn.relu(x @ params["encoder"])
    y, carry = jaxgru.step(params["gru"], y, carry, reset=starts)
    return y @ params["head"], carry


def q_unroll(
    params: dict[str, Any], x: jax.Array, carry: Any, starts: jax.Array
) -> tuple[Any, Any]:
    """Return the values for x (T, B, 6), and the carry after the last step."""
    y = jax.nn.relu(x @ params["encoder"])
    y, carry = jaxgru.unroll(params["gru"], y, carry, reset=starts, time_major=True)
    return y @ params["head"], carry


# --- Acting and storing


class Step(NamedTuple):
    """What is stored of a step, each (B, …)."""

    x: jax.Array
    starts: jax.Array  # an episode starts with this x: `done` of the step before
    carry: jax.Array  # before this x, and before the reset
    action: jax.Array
    reward: jax.Array
    done: jax.Array


class Actors(NamedTuple):
    """The environments, the agent's memory of each, and where an episode starts now."""

    state: State
    carry: jax.Array
    starts: jax.Array


def new_actors(key: jax.Array, num_envs: int, s: Settings) -> Actors:
    """Start an episode in every environment."""
    state = jax.vmap(new_episode)(jax.random.split(key, num_envs))
    return Actors(state, jnp.zeros((num_envs, s.hidden_dim)), jnp.ones(num_envs, bool))


def rollout(
    params: dict[str, Any], key: jax.Array, actors: Actors, num_steps: int, s: Settings
) -> tuple[Actors, Step]:
    """Act for some steps: most often the action with the highest value, else any."""

    def step(actors: Actors, key: jax.Array) -> tuple[Actors, Step]:
        state, carry, starts = actors
        keys = jax.random.split(key, 3)
        x = jax.vmap(observe)(state)
        q, carry_after = q_step(params, x, carry, starts)
        random_action = jax.random.randint(keys[0], starts.shape, 0, SYMBOLS)
        explores = jax.random.bernoulli(keys[1], s.epsilon, starts.shape)
        action = jnp.where(explores, random_action, q.argmax(-1))
        env_keys = jax.random.split(keys[2], len(starts))
        state, reward, done = jax.vmap(partial(act, s=s))(env_keys, state, action)
        return Actors(state, carry_after, done), Step(x, starts, carry, action, reward, done)

    return jax.lax.scan(step, actors, jax.random.split(key, num_steps))


def sample(replay: Step, oldest: jax.Array, key: jax.Array, s: Settings) -> Step:
    """Draw pieces (T, B, …) from the buffer, a ring whose oldest step is at this place."""
    keys = jax.random.split(key)
    T = s.burn_in + s.learned + 1
    first = oldest + jax.random.randint(keys[0], (s.batch_size,), 0, s.capacity - T + 1)
    env = jax.random.randint(keys[1], (s.batch_size,), 0, s.num_envs)
    places = (first + jnp.arange(T)[:, None]) % s.capacity
    return jax.tree.map(lambda a: a[places, env], replay)


# --- Learning


def q_learned(params: dict[str, Any], piece: Step, s: Settings) -> jax.Array:
    """Return the values of a piece's steps after the burn-in."""
    n = s.burn_in
    carry = piece.carry[0]
    if not s.stored:
        carry = jnp.zeros_like(carry)
    if n:
        # Of the carry that comes out, it would come too late: the burn-in would keep what it reads.
        constants, x = jax.lax.stop_gradient((params, piece.x[:n]))
        _, carry = q_unroll(constants, x, carry, piece.starts[:n])
    q, _ = q_unroll(params, piece.x[n:], carry, piece.starts[n:])
    return q


def q_of(q: jax.Array, action: jax.Array) -> jax.Array:
    """Return the values of these actions."""
    return jnp.take_along_axis(q, action[..., None], -1)[..., 0]


def loss_fn(params: dict[str, Any], target: dict[str, Any], piece: Step, s: Settings) -> jax.Array:
    """Return the mean of (r + γ Q'(s', argmax Q(s')) − Q(s, a))², which ends at `done`."""
    q = q_learned(params, piece, s)
    q_target = q_learned(target, piece, s)
    learned = jax.tree.map(lambda a: a[s.burn_in : -1], piece)
    later = jnp.where(learned.done, 0, q_of(q_target[1:], q[1:].argmax(-1)))
    goal = jax.lax.stop_gradient(learned.reward + s.gamma * later)
    return ((q_of(q[:-1], learned.action) - goal) ** 2).mean()


class Learner(NamedTuple):
    """The agent's weights and the older ones of its targets, and what it has seen."""

    params: dict[str, Any]
    target: dict[str, Any]
    opt_state: optax.OptState
    actors: Actors
    replay: Step


def train(key: jax.Array, s: Settings) -> dict[str, Any]:
    """Train an agent; return its parameters."""
    keys = jax.random.split(key, 4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(s.learning_rate))

    def update(learner: Learner, now: tuple) -> tuple[Learner, None]:
        params, target, opt_state, actors, replay = learner
        i, key = now
        keys = jax.random.split(key)
        place = i * s.learned % s.capacity
        actors, new = rollout(params, keys[0], actors, s.learned, s)
        replace = partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=0)
        replay = jax.tree.map(replace, replay, new)
        piece = sample(replay, place + s.learned, keys[1], s)
        gradient = jax.grad(loss_fn)(params, target, piece, s)
        changes, opt_state = optimizer.update(gradient, opt_state)
        params = optax.apply_updates(params, changes)
        target = jax.tree.map(partial(jnp.where, i % s.target_every == 0), params, target)
        return Learner(params, target, opt_state, actors, replay), None

    params = init(keys[0], s)
    actors = new_actors(keys[1], s.num_envs, s)
    actors, replay = rollout(params, keys[2], actors, s.capacity, s)  # fills the buffer
    learner = Learner(params, params, optimizer.init(params), actors, replay)
    steps = jnp.arange(s.updates), jax.random.split(keys[3], s.updates)
    learner, _ = jax.lax.scan(update, learner, steps)
    return learner.params


def right_answers(
    params: dict[str, Any], key: jax.Array, num_steps: int, num_parts: int, s: Settings
) -> jax.Array:
    """Return the share of right answers in each part of 500 long episodes, without exploration."""
    s = s._replace(epsilon=0.0, end=0.0)
    _, steps = rollout(params, key, new_actors(key, 500, s), num_steps, s)
    is_asked = steps.x[..., -1]
    right = steps.reward.reshape(num_parts, -1).sum(1)
    asked = is_asked.reshape(num_parts, -1).sum(1)
    return right / asked


# --- The command

OPTIONS = {
    "updates": "how often the agent acts and learns",
    "learned": "steps of a piece that it learns from",
    "burn_in": "steps of a piece that it only reads, with and without which it is trained",
    "num_envs": "environments side by side",
    "hidden_dim": "size of the memory",
}
STEPS = 240  # of an episode in the test
PARTS = 6


def settings() -> tuple[int, Settings]:
    """Parse the arguments: how many seeds, and the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="train each with seeds 0, 1, … (1)"
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
    arguments = parser.parse_args()
    for name in ("seeds", *OPTIONS):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be above 0.")
    s = Settings(**{name: getattr(arguments, name) for name in OPTIONS})
    s = s._replace(capacity=s.capacity // s.learned * s.learned)
    if s.burn_in + s.learned >= s.capacity:
        parser.error(f"--learned and --burn-in must be below {s.capacity} together, the buffer.")
    return arguments.seeds, s


def shares_of(s: Settings, seeds: int) -> np.ndarray:
    """Train agents; return how often they are right in each part of the test, in the median."""
    train_once = jax.jit(partial(train, s=s))
    test = jax.jit(partial(right_answers, num_steps=STEPS, num_parts=PARTS, s=s))
    shares = []
    for seed in range(seeds):
        for_training, for_test = jax.random.split(jax.random.key(seed))
        shares.append(test(train_once(for_training), for_test))
    return np.median(shares, 0)


def main() -> None:
    """Train agents in four ways, and print how often each is right."""
    seeds, s = settings()
    size = STEPS // PARTS
    ages = [f"{first}–{first + size - 1}" for first in range(0, STEPS, size)]
    print(f"right answers, by steps since the symbol (guesses: {1 / SYMBOLS:.0%})")
    print(" " * 24 + "".join(f"{age:>9}" for age in ages))
    for stored in (False, True):
        for burn_in in (0, s.burn_in):
            way = s._replace(stored=stored, burn_in=burn_in)
            name = "stored state" if stored else "zeros"
            if burn_in:
                name += f", burn-in {burn_in}"
            start = time.perf_counter()
            row = "".join(f"{share:>9.0%}" for share in shares_of(way, seeds))
            print(f"{name:<24}{row}  {time.perf_counter() - start:4.0f} s", flush=True)


if __name__ == "__main__":
    main()
