"""Set up the process while libraries are imported; every script imports this module first.

Until `run_script` takes over, Ctrl-C ends the process without a traceback, and a terminal shows
that the libraries are being loaded, which takes seconds. A closed standard stream becomes
/dev/null: otherwise the next file that is opened gets its number, and C libraries print into it.
"""

import os
import signal
import sys

import __main__

_script = os.path.realpath(getattr(__main__, "__file__", ""))

if _script.startswith(os.path.dirname(os.path.realpath(__file__)) + os.sep):  # not in tests
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `nohup` ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, _name) is None:
            setattr(sys, _name, open(os.devnull, _mode))
    if sys.stderr.isatty():
        print("loading …", end="\r", file=sys.stderr, flush=True)
