"""Scripts for the maintainers: corpus, planted errors, releases, GPU measurements, playground."""
