"""Commands of a checkout, such as `python scripts/train.py` or `python -m scripts.pages.notebooks`.

This puts the scripts' folder on the path for the latter, where Python puts it for the former.
"""

import sys
from os.path import dirname

sys.path.insert(0, dirname(__file__))
