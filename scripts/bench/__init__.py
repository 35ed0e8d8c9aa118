"""Speed: contestants, timing, records and their page."""
