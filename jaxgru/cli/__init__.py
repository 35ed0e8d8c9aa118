"""The commands: options in, one call, text out. Only these know of exits and terminals."""
