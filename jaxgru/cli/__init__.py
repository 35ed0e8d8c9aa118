"""The commands: options in, one call, text out.

Only these read options. They choose exit codes, too, but for two ways to end a process at once: a
second Ctrl-C (`lm/runs/terminal.py`), and another process of a run that is lost or never connects
(`parallel/processes.py`).
"""
