"""`palestra trajectory`: the trajectory API as a program."""

from palestra.faces.cli.serve import trajectory as command

__all__ = ["command"]
