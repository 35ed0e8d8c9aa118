"""The pages of docs/: the records they are made from, templates with the prose, and figures."""
