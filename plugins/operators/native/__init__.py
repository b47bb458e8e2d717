"""Operators as small C kernels for CPUs, compiled by the machine that runs them."""

from dovetail.plugins.operators.native.operators import NativeOperators

__all__ = ["NativeOperators"]
