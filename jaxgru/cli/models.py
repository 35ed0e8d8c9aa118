"""List the models: each config to train, with the losses of those that are trained."""

from __future__ import annotations

from jaxgru.cli.options import Parser
from jaxgru.errors import HOW_TO_INSTALL_MODELS
from jaxgru.lm import num_params, pretrained_names, shapes
from jaxgru.lm.config import about, config_names, load_config
from jaxgru.lm.pretrained import measured_losses

ROW = "{:<13}{:>10}{:>7}{:>7}  {}".format


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    return Parser(__doc__, ["models"])


def main() -> None:
    """Print a line per config, and what the columns say."""
    make_parser().parse_args()
    print(ROW("model", "parameters", "loss", "reset", "what it is for"))
    losses = measured_losses()
    for name in config_names():
        size = num_params(shapes(load_config(name).model))
        stream = "–"
        stateless = "–"
        if name in losses:
            stream = f"{losses[name]['stream']:.2f}"
            stateless = f"{losses[name]['stateless']:.2f}"
        print(ROW(name, f"{size:,}", stream, stateless, about(name)))
    print(
        "\nloss: nats per character on the validation text, with the state never reset;\n"
        "reset: the same with a reset before each token; –: there is no trained model.\n"
        "jaxgru train NAME trains one."
    )
    missing = sorted(losses.keys() - set(pretrained_names()))
    if missing:
        print(f"For the trained {', '.join(missing)},\n{HOW_TO_INSTALL_MODELS}.")
