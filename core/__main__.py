"""`python -m dovetail` is the command `dovetail`."""

from dovetail.cli.main import main

main()
