"""Scripts for the maintainers: corpus table, planted errors, releases, GPU measurements, playground."""
