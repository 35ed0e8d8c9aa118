"""Every script imports this first, for what must hold while the others are being imported.

Until `run_script` takes over, Ctrl-C ends the process as it ends any program, without a traceback,
and a terminal says that the libraries are being loaded, which takes seconds.
A closed standard stream becomes /dev/null: else the next file that is opened gets its number, and
what C libraries print goes there.
"""

import os
import signal
import sys

import __main__

_script = os.path.realpath(getattr(__main__, "__file__", ""))

if _script.startswith(os.path.dirname(os.path.realpath(__file__)) + os.sep):  # or tests import it
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `nohup` ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, _name) is None:
            setattr(sys, _name, open(os.devnull, _mode))
    if sys.stderr.isatty():
        print("loading …", end="\r", file=sys.stderr, flush=True)
