"""Choose the next token, and generate text: with the state, or without it, the study's bug."""

import torch


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """Return the probabilities (B, V) to draw from: temperature, then top_k, then top_p."""
    p, order = torch.softmax(logits / temperature, dim=-1).sort(dim=-1, descending=True)
    if top_k is not None:
        p[:, top_k:] = 0
        p = p / p.sum(dim=-1, keepdim=True)
    if top_p is not None:
        p[p.cumsum(dim=-1) - p >= top_p] = 0  # the more likely tokens reach top_p without this one
        p = p / p.sum(dim=-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, p)


@torch.no_grad()
def generate(
    model,
    prompt,
    num_tokens,
    carry=None,
    *,
    temperature=1.0,
    top_k=None,
    top_p=None,
    stateful=True,
    whole_prompt=True,
    generator=None,
):
    """Return tokens (B, num_tokens) after a prompt (B, P), and the carry; temperature 0 is greedy.

    With stateful=False, the state is reset to zero before every token. With whole_prompt=False,
    only the prompt's last token is read, as in the study's samplers even when stateful.
    """
    if stateful and whole_prompt and prompt.shape[1] > 1:
        _, carry = model(prompt[:, :-1], carry)
    token = prompt[:, -1:]
    tokens = []
    for _ in range(num_tokens):
        if not stateful:
            carry = None
        logits, carry = model(token, carry)
        if temperature == 0:
            token = logits[:, -1].argmax(dim=-1, keepdim=True)
        else:
            p = distribution(logits[:, -1], temperature, top_k, top_p)
            token = torch.multinomial(p, 1, generator=generator)
        tokens.append(token)
    return torch.cat(tokens, dim=1), carry
