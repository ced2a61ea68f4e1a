"""Environments that are ready to run: one file each, all offline."""
