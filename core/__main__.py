"""`python -m dovetail` is the command `dovetail`."""

from dovetail.commands.main import main

main()
