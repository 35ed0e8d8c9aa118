"""Data: corpora, tokenizers, splits and batches; independent of any model."""
