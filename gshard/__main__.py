"""`python -m gshard` is the command `gshard`."""

from gshard.cli import main

main()
