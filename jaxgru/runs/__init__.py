"""A training run on disk: its folder, its checkpoints, and its life from start to finish."""
