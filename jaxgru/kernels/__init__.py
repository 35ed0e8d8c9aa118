"""Faster computations for particular devices, with the contract of `cells.base.Recurrent`."""
