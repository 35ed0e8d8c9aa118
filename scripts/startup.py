"""Set up the process; every script imports this module first: see jaxgru/cli/startup.py."""

try:
    import jaxgru.cli.startup  # noqa: F401
    from jaxgru.cli.options import run_command  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jaxgru":
        raise
    raise SystemExit("jaxgru is not installed; pip install -e '.[train,corpus]' does it.") from None
