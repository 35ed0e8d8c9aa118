"""Scripts for the maintainers: the table of the corpus, the playground's assets, releases."""
