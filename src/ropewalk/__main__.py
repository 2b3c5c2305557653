"""`python -m ropewalk`: the command line, if the `ropewalk` script is not on PATH."""

from ropewalk.tools.cli import main

if __name__ == "__main__":
    main()
