"""`python -m lazydecode`: the command line."""

from lazydecode.cli import main

main()
