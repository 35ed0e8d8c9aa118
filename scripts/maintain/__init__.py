"""What only the maintainers run: the corpus table, planted errors, releases, the GPU day."""
