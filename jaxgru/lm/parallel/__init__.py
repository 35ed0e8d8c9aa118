"""Several devices and processes: where arrays are placed, and what the processes agree on."""
