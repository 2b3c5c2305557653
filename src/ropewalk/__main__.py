"""The `ropewalk` command, and `python -m ropewalk` where it is not on PATH."""

import importlib.util
import sys

from ropewalk.errors import RopewalkError

# The requirements of the extra `cli`, which the rest of ropewalk does not import.
NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line, or say which packages it lacks."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        error = RopewalkError(
            asked="the command line of ropewalk",
            expected=f"the packages {' and '.join(NEEDED)}; `import ropewalk` needs neither",
            got=f"no {' and no '.join(missing)}",
            do="pip install 'ropewalk[cli]', or in a clone: pip install '.[cli]'",
        )
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2)
    from ropewalk.tools.cli import main as run

    run()


if __name__ == "__main__":
    main()
