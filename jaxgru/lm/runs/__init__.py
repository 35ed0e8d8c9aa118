"""Training runs on disk: folders, checkpoints, starting and resuming."""
