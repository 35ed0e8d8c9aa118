"""Accelerated unrolls for one kind of device each, behind the contract of `unroll.py`."""
