"""Deprecation: a name goes on to work and says what takes its place.

What is deprecated in a minor version works in that one and in the two after it, and goes with the next major version
(docs/versioning.md). Each place that uses it is warned once per process::

    @deprecated("dovetail.nn.expected_shapes", goes_in="dovetail.nn 2.0")
    def tensor_shapes(module): ...

For what no decorator reaches (a module's name, a field, an argument, a method that plugins override), call
`warn_deprecated` where it is met.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_warned: set[tuple[str, str, int]] = set()
"""(what is deprecated, file, line) of the places that were warned."""


def deprecated(instead: str, *, goes_in: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a function or method. `instead` is what to use, as a reader would look for it; `goes_in` the surface and
    version without it: "scheduler 2.0"."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = f"{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def warning(*args: P.args, **kwargs: P.kwargs) -> R:
            warn_deprecated(name, instead, goes_in=goes_in)
            return function(*args, **kwargs)

        return warning

    return decorate


def warn_deprecated(name: str, instead: str, *, goes_in: str, depth: int = 1) -> None:
    """Warns (DeprecationWarning) of the use of `name`, once for each place.

    `depth` says which place it is: 1 is the caller of the function that calls this.
    """
    frame = sys._getframe(depth + 1)
    place = (name, frame.f_code.co_filename, frame.f_lineno)
    if place not in _warned:
        _warned.add(place)
        warnings.warn(f"{name} is deprecated: use {instead}. It goes in {goes_in}.", DeprecationWarning, depth + 2)
