"""Say how to install jaxgru where it is missing; every script imports this module first."""

try:
    from jaxgru.cli.options import run_command  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jaxgru":
        raise
    raise SystemExit("jaxgru is not installed; pip install -e '.[train,corpus]' does it.") from None
