"""`dovetail docs`: the documentation, offline."""
