"""The command line: one file or one folder per command, each of which also works as a function."""
