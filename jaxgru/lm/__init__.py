"""The language model: configs, training, sampling, files, and the published study.

    from jaxgru import lm

    params, config, tokenizer = lm.load("astra_beta")
    logits, carry = lm.apply(params, tokens, carry)  # tokens (B, T) → logits (B, T, V)

The state of a model, `carry`, is an argument and a result.
"""

from jaxgru.lm.beam_search import beam_search
from jaxgru.lm.config import Config, ModelConfig, config_names, load_config
from jaxgru.lm.evaluation import Scores, score, score_lines
from jaxgru.lm.generation import stream_text
from jaxgru.lm.load import Found, find_model, load, save
from jaxgru.lm.model import (
    HeadParams,
    LayerNormParams,
    Params,
    apply,
    flatten,
    init,
    initial_carry,
    num_params,
    shapes,
    step,
    token_nll,
)
from jaxgru.lm.pretrained import pretrained_names
from jaxgru.lm.sampling import generate

__all__ = [
    "Config",
    "Found",
    "HeadParams",
    "LayerNormParams",
    "ModelConfig",
    "Params",
    "Scores",
    "apply",
    "beam_search",
    "config_names",
    "find_model",
    "flatten",
    "generate",
    "init",
    "initial_carry",
    "load",
    "load_config",
    "num_params",
    "pretrained_names",
    "save",
    "score",
    "score_lines",
    "shapes",
    "step",
    "stream_text",
    "token_nll",
]
