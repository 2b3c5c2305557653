"""`python -m ropewalk`: the command line, for machines where its script is not on the path."""

from ropewalk.tools.cli import main

if __name__ == "__main__":
    main()
