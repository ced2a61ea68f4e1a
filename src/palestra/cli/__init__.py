"""The command line: one module for each command or group of commands; `common` holds the options that they share."""
