"""`torchrun -m ropewalk.lab run ...`: the command `ropewalk lab`, for torchrun, which starts modules."""

import sys

from ropewalk.tools.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["lab"]
    main()
