"""jaxgru against other implementations, on shared weights."""
