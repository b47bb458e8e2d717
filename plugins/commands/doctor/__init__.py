"""`dovetail doctor`: the machine, what it can do, and what the configured model makes of it."""
