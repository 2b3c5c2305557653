"""The README's first lines of code on an installed ropewalk: `python tests/installed.py` in an environment to check.

Prints, as JSON, the version, why there is no C kernel (null if there is one), and what third-party packages are loaded.
"""

import json
import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def first_code() -> str:
    """The first block of Python code of the README."""
    block = re.search(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert block, "the README has code"
    return block[1]


if __name__ == "__main__":
    # The installed package, not the sources beside this file.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).parent]
    exec(first_code(), {})
    import ropewalk
    from ropewalk.ops import backend_reasons

    loaded = {name.partition(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)}
    sys.stdout.write(
        json.dumps(
            {
                "version": ropewalk.__version__,
                "place": ropewalk.__file__,
                "no C kernel": backend_reasons()["native"],
                "loaded": sorted(loaded - sys.stdlib_module_names),
            }
        )
    )
