"""Scripts for the maintainers: the corpus table, planted errors, releases, GPU measurements."""
