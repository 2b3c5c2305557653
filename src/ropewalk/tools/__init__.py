"""The command line: one file a command, each of which also works as a function."""
