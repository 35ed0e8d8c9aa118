"""A layer, a stack or two directions over time: what users call, and who computes it."""

from jaxgru.layers.api import bidirectional, initial_carry, step, unroll
from jaxgru.layers.dropout import SITES, Dropout, Dropouts, Site, dropout_at_step, seed_dropout
from jaxgru.layers.implementations import Implementation, which_gradient
from jaxgru.layers.remat import in_segments
from jaxgru.layers.stack import Layers, ResidualStack, init_stack
from jaxgru.layers.validate import check_carry
from jaxgru.layers.weight_drop import drop_weights, has_recurrent_weights

__all__ = [
    "SITES",
    "Dropout",
    "Dropouts",
    "Implementation",
    "Layers",
    "ResidualStack",
    "Site",
    "bidirectional",
    "check_carry",
    "drop_weights",
    "dropout_at_step",
    "has_recurrent_weights",
    "in_segments",
    "init_stack",
    "initial_carry",
    "seed_dropout",
    "step",
    "unroll",
    "which_gradient",
]
