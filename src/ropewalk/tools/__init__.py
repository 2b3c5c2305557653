"""The command line: one file or folder per command. Every command can also be called as a Python function."""
