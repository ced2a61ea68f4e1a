"""`python -m palestra` is the `palestra` command."""

from palestra.cli.main import main

main()
