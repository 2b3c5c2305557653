"""`torchrun -m ropewalk.lab run ...`: the command `ropewalk lab`, for torchrun, which starts modules."""

import sys

from ropewalk.lab.ranks import end_rank
from ropewalk.tools.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["lab"]
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    end_rank(status)
