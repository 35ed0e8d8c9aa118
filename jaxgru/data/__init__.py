"""A config's corpus as tokens: text, tokenizers, splits, batches. Knows no model."""
