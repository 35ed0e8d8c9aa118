"""What makes docs/study.md: its runs, their records, claims, tables and figures."""
