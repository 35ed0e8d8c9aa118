"""The commands: options in, one call, text out.

Nothing else reads options or chooses exit codes, except what ends a process at once: a second
Ctrl-C (`lm/runs/terminal.py`), and a lost process of the same run (`parallel/processes.py`).
"""
