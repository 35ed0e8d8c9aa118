"""The study's training step: clipping, AdamW, cosine annealing stepped once per epoch."""

import torch
from torch.nn.functional import cross_entropy


def make_optimizer(model, learning_rate, epochs, weight_decay=0.01):
    """Return AdamW on all parameters, with biases and embeddings, and its schedule."""
    optimizer = torch.optim.AdamW(
        model.parameters(), learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    return optimizer, schedule


def loss_fn(model, inputs, targets, carry=None, masks=None):
    """Return the mean cross-entropy in nats per token."""
    logits, _ = model(inputs, carry, masks)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_step(model, optimizer, inputs, targets, masks=None, max_grad_norm=1.0):
    """Take one step on one batch; return the loss before it."""
    loss = loss_fn(model, inputs, targets, masks=masks)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return loss.item()


def train_epoch(model, optimizer, schedule, batches, max_grad_norm=1.0):
    """Train on batches (inputs, targets) or (inputs, targets, masks); return each step's loss."""
    model.train()
    losses = []
    for batch in batches:
        losses.append(train_step(model, optimizer, *batch, max_grad_norm=max_grad_norm))
    schedule.step()
    return losses
