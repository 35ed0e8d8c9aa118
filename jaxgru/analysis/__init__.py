"""The cost of a reset state, and the simpler models to compare with."""
