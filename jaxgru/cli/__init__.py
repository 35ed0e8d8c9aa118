"""The commands: options in, one call, text out.

Only these read options and choose exit codes. A run shows its own progress (`runs/terminal.py`).
"""
