"""The cost of a lost state, and the simpler models to compare with."""
