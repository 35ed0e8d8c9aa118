"""Commands of a checkout: `python scripts/train.py`; in folders, `python -m scripts.bench.cost`.

This puts the scripts' folder on the path for the latter, where Python puts it for the former.
"""

import sys
from os.path import dirname

sys.path.insert(0, dirname(__file__))
