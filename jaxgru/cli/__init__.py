"""The commands: options in, one call, text out. Only here are exits and terminals known."""
