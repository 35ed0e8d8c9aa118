"""Faster computations for one kind of device each, behind the contract of `cells.base.Gated`."""
