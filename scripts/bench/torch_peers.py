"""The contestant in PyTorch, `torch.nn`; torchref trains it and samples from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import torchref
from bench.timing import TEMPERATURE, TOP_K, Contestant, LayerTask, Task, on_cpu, random_tokens
from jaxgru.lm.config import Config
from torchref.training import loss_fn, make_optimizer


def device() -> str:
    """Return torch's device: a GPU only if JAX computes on one, too."""
    if on_cpu() or not torch.cuda.is_available():
        return "cpu"
    return "cuda"


def _synchronize() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _precision(precision: str) -> Iterator[None]:
    """Set the precision of matrix products inside, also in oneDNN's and cuDNN's recurrences."""
    matmul_before = torch.get_float32_matmul_precision()
    cudnn_before = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(device(), torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul_before)
        torch.backends.cudnn.allow_tf32 = cudnn_before


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


def contestant(task: Task | LayerTask, precision: str) -> Contestant:
    """Return a model or a layer at a task."""
    if isinstance(task, LayerTask):
        return _layer(task, precision)
    model = _torch_nn(task.config).to(device()).train(task.what == "training")
    tokens = torch.as_tensor(np.array(random_tokens(task), np.int64), device=device())
    makers = {"training": _training, "forward": _forward, "sampling": _sampling}
    make_call = makers[task.what]
    call = make_call(task, model, tokens)

    def run(calls: int) -> Any:
        with _precision(precision):
            for _ in range(calls):
                result = call()
            _synchronize()
        return result

    return Contestant(run)


def _layer(task: LayerTask, precision: str) -> Contestant:
    cell = nn.LSTM if task.cell == "LSTM" else nn.GRU
    x = torch.randn(task.num_tokens, task.batch_size, task.hidden_dim)
    module = cell(task.hidden_dim, task.hidden_dim).to(device())
    x = x.to(device()).requires_grad_()
    inputs = [*module.parameters(), x]

    def run(calls: int) -> None:
        with _precision(precision):
            for _ in range(calls):
                torch.autograd.grad(module(x)[0].square().sum(), inputs)
            _synchronize()

    return Contestant(run)


def _training(task: Task, model: Any, tokens: Any) -> Callable[[], Any]:
    """Return torchref's step, but without waiting for the loss, as the others do not."""
    t = task.config.training
    optimizer, _ = make_optimizer(model, t.learning_rate, t.epochs, t.weight_decay)
    steps = torch.arange(t.sequence_length + 1, device=tokens.device)

    def call() -> Any:
        most = len(tokens) - t.sequence_length - 1
        starts = torch.randint(most, (t.batch_size, 1), device=tokens.device)
        crops = tokens[starts + steps]
        loss = loss_fn(model, crops[:, :-1], crops[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return call


def _forward(task: Task, model: Any, tokens: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch.inference_mode():
            logits, _ = model(tokens)
            return logits

    return call


def _sampling(task: Task, model: Any, tokens: Any) -> Callable[[], Any]:
    return partial(
        torchref.generate, model, tokens, task.num_tokens, temperature=TEMPERATURE, top_k=TOP_K
    )
