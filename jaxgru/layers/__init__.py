"""A layer, a stack or two directions over time: what users call, and who computes it."""
