"""`torchrun -m ropewalk.lab run ...`: the command `ropewalk lab`, for torchrun, which starts modules."""

import sys

from ropewalk.lab.ranks import end_rank
from ropewalk.tools.cli import main


def run() -> int:
    """Run the command line, and return its exit status."""
    sys.argv[1:1] = ["lab"]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    end_rank(run())
