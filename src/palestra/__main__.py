"""`python -m palestra` is the `palestra` command."""

from palestra.faces.cli.main import main

main()
