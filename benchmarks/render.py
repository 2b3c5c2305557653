"""Writes the measured figures of README.md and docs/ from the records in this folder.

`python benchmarks/render.py` rewrites the text between `<!-- figures: NAME -->` and `<!-- /figures -->` on every page.
`--check` changes nothing and exits with 1 if a page differs. A record that was edited by hand, misses a floor or was
measured with `--quick` is an error.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

from figures import BLOCKS, read_from

from ropewalk.errors import RopewalkError

RECORDS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->)(?P<content>.*?)(<!-- /figures -->)", re.DOTALL)
# Names of processors for which `processor` returns only a part number.


def rendered(page: str) -> str:
    """A page with new content in each block."""

    def content(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise RopewalkError(
                asked=f"the block {name!r}",
                expected=" or ".join(sorted(BLOCKS)),
                got=name,
                do="use one of these names, or add a function to benchmarks/figures/",
            )
        return match[1] + BLOCKS[name](page) + match[4]

    return BLOCK.sub(content, page)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page would change")
    parser.add_argument("--root", type=Path, default=RECORDS.parent, help="the folder with README.md and docs/")
    parser.add_argument("--records", type=Path, default=RECORDS, help="the folder with the records")
    options = parser.parse_args(arguments)
    read_from(options.records)
    changed = False
    try:
        for path in (options.root / "README.md", *sorted((options.root / "docs").rglob("*.md"))):
            old = path.read_text(encoding="utf-8")
            new = rendered(old)
            if new == old:
                continue
            changed = True
            if options.check:
                lines = (text.splitlines(keepends=True) for text in (old, new))
                sys.stdout.writelines(unified_diff(*lines, str(path), f"{path}, rendered"))
            else:
                path.write_text(new, encoding="utf-8")
                print(f"rendered {path.relative_to(options.root)}")
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    if options.check and changed:
        sys.stderr.write("run `make records`\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
