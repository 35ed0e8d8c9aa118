"""Scripts for the maintainers: corpus, ablation, planted errors, releases, pages, playground."""
