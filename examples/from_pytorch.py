"""Load a PyTorch model into jaxgru, train it further, and return the weights to PyTorch.

    python examples/from_pytorch.py
    python examples/from_pytorch.py --text my_text.txt --hidden-dim 128

A character model is trained in PyTorch for some steps and saved as a .pth file, with its
`state_dict` and its characters. jaxgru loads the file, computes the same logits, and trains the
model further with Optax. At the end, the PyTorch module takes the new weights, and both compute the
same logits again. For another model, change `Model` and the two functions below it. They convert
the recurrent layers in one call, and all else array by array.

It needs PyTorch and Optax: `pip install torch optax`.
"""

import argparse
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from jaxgru import UserError, lm
from jaxgru.libraries.torch_nn import from_torch, to_torch
from jaxgru.lm import HeadParams, token_nll
from jaxgru.lm.data.sources import read_text

B = 16  # rows of a batch
T = 64  # characters of a row


class Model(torch.nn.Module):
    """The model in PyTorch."""

    def __init__(self, vocab_size: int, hidden_dim: int, num_layers: int = 1):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, hidden_dim)
        self.gru = torch.nn.GRU(hidden_dim, hidden_dim, num_layers, batch_first=True)
        self.head = torch.nn.Linear(hidden_dim, vocab_size)

    def forward(self, tokens: torch.Tensor, h: torch.Tensor | None = None):
        y, h = self.gru(self.embedding(tokens), h)
        return self.head(y), h


def from_state_dict(weights: dict[str, torch.Tensor]) -> lm.Params:
    """Return jaxgru's parameters of the model."""
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    gru = {
        name.removeprefix("gru."): array
        for name, array in arrays.items()
        if name.startswith("gru.")
    }
    return lm.Params(
        embedding=jnp.array(arrays["embedding.weight"]),
        layers=from_torch(gru),  # any number of them
        norm=None,
        head=HeadParams(
            Wo=jnp.array(arrays["head.weight"]).T,
            bo=jnp.array(arrays["head.bias"]),
        ),
    )


def to_state_dict(params: lm.Params) -> dict[str, torch.Tensor]:
    """Return the state_dict of `Model`: the inverse, exactly."""
    tensor = lambda array: torch.tensor(np.array(array))
    layers = to_torch(params.layers).state_dict()
    return {
        "embedding.weight": tensor(params.embedding),
        **{f"gru.{name}": weight for name, weight in layers.items()},
        "head.weight": tensor(params.head.Wo.T),
        "head.bias": tensor(params.head.bo),
    }


def report(library: str, step: int, loss: float) -> None:
    """Print the loss of every 50th batch."""
    if step % 50 == 0:
        print(f"{library:7}  step {step:3}  loss {loss:.3f}")


def train_in_pytorch(tokens: np.ndarray, vocab_size: int, hidden_dim: int, steps: int) -> Model:
    """Train a new model on random pieces of a text."""
    torch.manual_seed(0)
    model = Model(vocab_size, hidden_dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    all_starts = np.random.default_rng(0).integers(0, len(tokens) - T, (steps, B, 1))
    for i, starts in enumerate(all_starts, 1):
        batch = torch.tensor(tokens[starts + np.arange(T + 1)])
        logits, _ = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report("PyTorch", i, loss.item())
    return model


@jax.jit
def loss_fn(params: lm.Params, batch: jax.Array) -> jax.Array:
    """Return the loss of tokens (B, T + 1), nats per token."""
    logits, _ = lm.apply(params, batch[:, :-1])
    return token_nll(logits, batch[:, 1:]).mean()


def train(params: lm.Params, tokens: np.ndarray, steps: int) -> lm.Params:
    """Train a model further in JAX, in the same way."""
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params: lm.Params, moments: optax.OptState, batch: jax.Array):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, updates), moments, loss

    moments = optimizer.init(params)
    all_starts = np.random.default_rng(1).integers(0, len(tokens) - T, (steps, B, 1))
    for i, starts in enumerate(all_starts, 1):
        params, moments, loss = step(params, moments, tokens[starts + np.arange(T + 1)])
        report("jaxgru", i, loss.item())
    return params


def compare(model: Model, params: lm.Params, batch: np.ndarray) -> str:
    """Return how far apart the two libraries' logits of a text are, and the loss."""
    with torch.no_grad():
        theirs, _ = model(torch.tensor(batch[:, :-1]))
    ours, _ = lm.apply(params, batch[:, :-1])
    gap = abs(ours - theirs.numpy()).max()
    return f"loss {loss_fn(params, batch):.3f}; logits differ by at most {gap:.0e}"


def read(place: str | None) -> str:
    """Return the text of a file or, without one, Python's language reference."""
    if place:
        return read_text(place).text
    return "\n".join(topics.values())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", metavar="FILE", help="a text in UTF-8 (Python's language reference)")
    add(
        "--hidden-dim",
        type=int,
        default=64,
        metavar="N",
        help="size of an embedding and of the state (%(default)s)",
    )
    add(
        "--steps",
        type=int,
        default=200,
        metavar="N",
        help="training steps in each library (%(default)s)",
    )
    return parser


def main() -> None:
    """Parse the arguments, and go from PyTorch to jaxgru and back."""
    parser = make_parser()
    arguments = parser.parse_args()
    try:
        text = read(arguments.text)
    except UserError as error:
        parser.error(str(error))
    if len(text) < 2 * B * (T + 1):
        parser.error(f"the text has {len(text):,} characters; it must have {2 * B * (T + 1):,}.")
    characters = sorted(set(text))
    tokens = np.array([characters.index(c) for c in text])
    tokens, end = np.split(tokens, [-B * (T + 1)])
    validation = end.reshape(B, T + 1)  # on which neither library trains

    print(f"training on {len(tokens):,} characters, first in PyTorch", flush=True)
    model = train_in_pytorch(tokens, len(characters), arguments.hidden_dim, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        torch.save({"characters": characters, "state_dict": model.state_dict()}, path)
        checkpoint = torch.load(path)
    params = from_state_dict(checkpoint["state_dict"])
    print(f"after {arguments.steps} steps in PyTorch:      {compare(model, params, validation)}")
    params = train(params, tokens, arguments.steps)
    model.load_state_dict(to_state_dict(params))
    print(f"after {arguments.steps} more steps in jaxgru:  {compare(model, params, validation)}")


if __name__ == "__main__":
    main()
