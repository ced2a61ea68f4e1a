"""The names and arguments of TRL, for scripts that were written for it."""
