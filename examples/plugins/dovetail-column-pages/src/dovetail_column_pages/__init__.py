"""An attention backend for Dovetail whose pages hold keys by columns."""
