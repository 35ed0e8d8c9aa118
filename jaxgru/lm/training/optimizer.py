"""The optimizer of every training run, and its learning rate from step to step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgru.errors import needs
from jaxgru.lm.config import TrainingConfig

with needs("train"):
    import optax


def learning_rate(training: TrainingConfig) -> optax.Schedule:
    """Return the learning rate as a function of the step s = 0 … S − 1.

    "cosine" is lr·(1 + cos(πe/E))/2 in all of epoch e = 0 … E − 1 (Loshchilov & Hutter 2016, arXiv
    1608.03983, eq. 5, without restarts and down to 0). "cosine_per_step" has s/S in place of e/E,
    "linear" is lr·(1 − s/S), and "constant" is lr; so is "plateau", whose scale is the
    optimizer's (`scale_of`). In the first W steps, the warm-up, each is multiplied by (s + 1)/W.
    """
    rate = training.learning_rate
    epochs = training.epochs
    steps = training.steps_per_epoch

    def cosine(step: Any) -> Array:
        epoch = jnp.asarray(step // steps).astype(float)
        return rate * (1 + jnp.cos(jnp.pi * epoch / epochs)) / 2

    decayed = {
        "cosine": cosine,
        "cosine_per_step": optax.cosine_decay_schedule(rate, epochs * steps),
        "linear": optax.linear_schedule(rate, 0.0, epochs * steps),
        "constant": optax.constant_schedule(rate),
        "plateau": optax.constant_schedule(rate),
    }[training.schedule]
    if not training.warmup_steps:
        return decayed
    warmup = optax.linear_schedule(0.0, 1.0, training.warmup_steps)
    return lambda step: warmup(step + 1) * decayed(step)


def optimizer(training: TrainingConfig) -> optax.GradientTransformation:
    """Return gradient clipping, then AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101).

    Weight decay is on EVERY parameter; without `decay_biases` on matrices alone, which are all
    arrays of more than one axis. With the schedule "plateau", a scale is the last of the chain.
    """
    adamw = optax.adamw(
        learning_rate(training),
        b1=training.beta1,
        b2=training.beta2,
        eps=training.epsilon,
        weight_decay=training.weight_decay,
        mask=None if training.decay_biases else _are_matrices,
    )
    parts = [clip_by_global_norm(training.max_grad_norm), adamw]
    if training.schedule == "plateau":
        parts.append(scale_by_plateau(training))
    return optax.chain(*parts)


def _are_matrices(params: Any) -> Any:
    """Return for each array whether it has more than one axis."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def scale_by_plateau(training: TrainingConfig) -> optax.GradientTransformation:
    """Multiply the updates by the scale in its state, which `after_validation` alone changes."""

    def scale(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optax.tree.scale(state.scale, updates), state

    return optax.GradientTransformation(_plateau(training).init, scale)


@partial(jax.jit, static_argnames="training")
def after_validation(
    training: TrainingConfig, opt_state: Any, val_loss: Float[Array, ""] | float
) -> Any:
    """Return the optimizer's state after an epoch of the schedule "plateau".

    A loss is better than the best one if it is lower by more than 1e-4 of it. PyTorch's
    `ReduceLROnPlateau` does the same with a patience that is one less.
    """
    *others, plateau = opt_state
    # Optax fails with "strict"
    with jax.numpy_dtype_promotion("standard"):
        _, plateau = _plateau(training).update((), plateau, value=val_loss)
    return *others, plateau


def scale_of(opt_state: optax.OptState) -> Any:
    """Return what the learning rate is multiplied by; 1 but for the schedule "plateau"."""
    return optax.tree.get(opt_state, "scale", 1.0)


def _plateau(training: TrainingConfig) -> optax.GradientTransformationExtraArgs:
    """Return Optax's transformation, whose state is that of `scale_by_plateau`."""
    return optax.contrib.reduce_on_plateau(training.plateau_factor, training.plateau_patience)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale gradients g by min(1, max_norm / (‖g‖ + 1e-6)), like `torch.nn.utils.clip_grad_norm_`.

    ‖g‖ is the norm of all gradients together (Pascanu et al. 2013, arXiv 1211.5063).
    `optax.clip_by_global_norm` lacks the 1e-6, which is enough to make two trajectories differ.
    """

    def clip(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * scale, updates)

    return optax.stateless(clip)
