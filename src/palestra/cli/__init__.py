"""The command line: one module per command, with its tables and progress bars.

`main` lists the commands and imports a command's module when it is called, so that `--help` is fast.
`benchmark/` measures what `palestra bench` prints.
"""
