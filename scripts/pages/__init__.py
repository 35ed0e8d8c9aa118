"""What makes docs/: records that are read, templates that hold the prose, figures."""
