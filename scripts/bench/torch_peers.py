"""The contestants in PyTorch: torchref, `torch.nn` and `torch.compile`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import torchref
from bench.timing import TEMPERATURE, TOP_K, Contestant, LayerTask, Task, on_cpu, random_tokens
from jaxgru.errors import UserError
from jaxgru.lm.config import Config
from torchref.training import loss_fn, make_optimizer


def device() -> str:
    """Return torch's device: a GPU only if JAX computes on one, too."""
    return "cuda" if not on_cpu() and torch.cuda.is_available() else "cpu"


def _synchronize() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _precision(precision: str) -> Iterator[None]:
    """Set the precision of matrix products inside, also in oneDNN's and cuDNN's recurrences."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(device(), torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _torchref(config: Config) -> Any:
    m, training = config.model, config.training
    if m.final_norm != (m.cell == "lstm") or (m.cell, m.reset_gate) == ("gru", "after"):
        raise UserError(
            "torchref has no such model: it needs reset_gate = before, and LayerNorm only in LSTMs."
        )
    cls = getattr(torchref, f"My{m.cell.upper()}Model")
    options = {"second_bias": m.second_bias} if m.cell == "gru" else {}
    sizes = m.vocab_size, m.embedding_dim, m.hidden_dim, m.num_layers
    ((site, rate),) = training.dropouts.items()
    return cls(*sizes, rate, site, **options)


def _torch_nn(config: Config) -> Any:
    m = config.model
    layers = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}[m.cell]

    class Network(nn.Module):
        """Has the signature of torchref's models, so that torchref's loss and sampler accept it."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(m.vocab_size, m.embedding_dim)
            self.layers = layers(m.embedding_dim, m.hidden_dim, m.num_layers, batch_first=True)
            self.norm = nn.LayerNorm(m.hidden_dim) if m.final_norm else nn.Identity()
            self.head = nn.Linear(m.hidden_dim, m.vocab_size)

        def forward(self, tokens: Any, carry: Any = None, masks: None = None) -> tuple:
            x, carry = self.layers(self.embedding(tokens), carry)
            return self.head(self.norm(x)), carry

    return Network()


MODELS = {"torchref": _torchref, "torch.nn": _torch_nn, "torch.compile": _torchref}


def contestant(library: str, task: Task | LayerTask, precision: str) -> Contestant:
    """Return one of MODELS at a task; `torch.nn` also has layers."""
    if isinstance(task, LayerTask):
        return _layer(task, precision)
    module = MODELS[library](task.config).to(device()).train(task.what == "training")
    model = module
    if library == "torch.compile":
        torch.compiler.reset()  # or it compiles for any size after it has seen others
        model = torch.compile(module)
    tokens = torch.as_tensor(np.array(random_tokens(task), np.int64), device=device())
    make = {"training": _training, "forward": _forward, "sampling": _sampling}
    call = make[task.what](task, module, model, tokens)

    def run(calls: int) -> Any:
        with _precision(precision):
            for _ in range(calls):
                result = call()
            _synchronize()
        return result

    return Contestant(run)


def _layer(task: LayerTask, precision: str) -> Contestant:
    cell = nn.LSTM if task.cell == "lstm" else nn.GRU
    x = torch.randn(task.num_tokens, task.batch_size, task.features)
    module = cell(task.features, task.hidden_dim).to(device())
    x = x.to(device()).requires_grad_()
    weights = torch.randn(*x.shape[:2], task.hidden_dim, device=device())
    inputs = [*module.parameters(), x]

    def run(calls: int) -> None:
        with _precision(precision):
            for _ in range(calls):
                torch.autograd.grad(torch.vdot(module(x)[0].flatten(), weights.flatten()), inputs)
            _synchronize()

    return Contestant(run)


def _training(task: Task, module: Any, model: Any, tokens: Any) -> Callable[[], Any]:
    """Return torchref's step, but without waiting for the loss, as the others do not."""
    t = task.config.training
    optimizer, _ = make_optimizer(module, t.learning_rate, t.epochs, t.weight_decay)
    steps = torch.arange(t.sequence_length + 1, device=tokens.device)

    def call() -> Any:
        most = len(tokens) - t.sequence_length - 1
        starts = torch.randint(most, (t.batch_size, 1), device=tokens.device)
        crops = tokens[starts + steps]
        loss = loss_fn(model, crops[:, :-1], crops[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), t.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return call


def _forward(task: Task, module: Any, model: Any, tokens: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch.inference_mode():
            return model(tokens)[0]

    return call


def _sampling(task: Task, module: Any, model: Any, tokens: Any) -> Callable[[], Any]:
    return lambda: torchref.generate(
        model, tokens, task.num_tokens, temperature=TEMPERATURE, top_k=TOP_K
    )
