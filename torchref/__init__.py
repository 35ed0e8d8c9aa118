"""The study's models in plain PyTorch; read models, training and sampling, in this order."""

from torchref.models import MyGRUModel, MyLSTMModel, MyRNNModel, ScribeAsPublished, load
from torchref.sampling import distribution, generate
from torchref.training import make_optimizer, train_epoch, train_step

__all__ = [
    "MyGRUModel",
    "MyLSTMModel",
    "MyRNNModel",
    "ScribeAsPublished",
    "distribution",
    "generate",
    "load",
    "make_optimizer",
    "train_epoch",
    "train_step",
]
