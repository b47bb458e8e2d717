"""`dovetail plugins new`: a distribution with one plugin, whose tests pass before the first edit."""
