"""Set up the process; every script imports this module first: see jaxgru/cli/startup.py."""

import jaxgru.cli.startup  # noqa: F401
