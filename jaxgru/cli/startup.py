"""Set up the process of a command before JAX is imported, which takes seconds.

`jaxgru/__init__.py` imports this module first, and so do the scripts. It does something only in a
process that was started as `jaxgru`, `python -m jaxgru` or `python scripts/….py`.

Until `run_script` takes over, Ctrl-C ends the process without a traceback, and a terminal shows
that the libraries are being loaded. A closed standard stream becomes /dev/null: otherwise the next
file that is opened gets its number, and C libraries print into it.
"""

import os
import signal
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"  # of a checkout


def is_command() -> bool:
    """Return whether this process was started as one of our commands."""
    if not getattr(sys, "argv", None):
        return False
    program = sys.argv[0]
    if program == "-m":  # as long as Python imports the package
        return sys.orig_argv[-len(sys.argv)] in ("jaxgru", "-mjaxgru")
    is_script = program.endswith(".py") and Path(program).resolve().is_relative_to(SCRIPTS)
    return is_script or os.path.splitext(os.path.basename(program))[0] == "jaxgru"


if is_command():
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `nohup` ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, _name) is None:
            setattr(sys, _name, open(os.devnull, _mode))
    if sys.stderr.isatty():
        print("loading …", end="\r", file=sys.stderr, flush=True)
