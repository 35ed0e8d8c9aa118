"""Many devices and many processes: where arrays are, and what processes must agree on."""
