"""Runs the Python blocks of pages: `python run_pages.py PAGE ...`. Exits with 1 after a list of the pages that fail.

The blocks of a page are one program, with names of its own. All pages share one process, because importing torch and
transformers takes longer than most pages.
"""

import contextlib
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

from page_results import program


def run(page: Path) -> bool:
    """Whether the page runs to its end. The traceback of one that does not goes to standard error."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        try:
            exec(compile(program(page), page, "exec"), {"__name__": "__main__"})
        # A page may raise anything, SystemExit included.
        except BaseException:
            traceback.print_exc()
            return False
        finally:
            torch.set_default_dtype(torch.float32)
            torch.compiler.reset()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return True


if __name__ == "__main__":
    failed = [page for page in map(Path, sys.argv[1:]) if not run(page.resolve())]
    sys.exit(f"pages that fail: {', '.join(page.name for page in failed)}" if failed else 0)
