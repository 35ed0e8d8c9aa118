"""One training step as the study takes it: clip, AdamW, cosine annealing stepped once an epoch."""

import torch
from torch.nn.functional import cross_entropy


def make_optimizer(model, learning_rate, epochs, weight_decay=0.01):
    """AdamW on every parameter, biases and embeddings too, and its schedule."""
    optimizer = torch.optim.AdamW(
        model.parameters(), learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay
    )
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)


def loss_fn(model, inputs, targets, carry=None, masks=None):
    """Mean cross-entropy, nats a token."""
    logits, _ = model(inputs, carry, masks)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_step(model, optimizer, inputs, targets, masks=None, max_grad_norm=1.0):
    """One step on one batch; returns the loss before it."""
    loss = loss_fn(model, inputs, targets, masks=masks)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return loss.item()


def train_epoch(model, optimizer, schedule, batches, max_grad_norm=1.0):
    """Each step's loss; batches give (inputs, targets) or (inputs, targets, masks)."""
    model.train()
    losses = [train_step(model, optimizer, *b, max_grad_norm=max_grad_norm) for b in batches]
    schedule.step()
    return losses
