"""Hooks of the docs build: what a page links to outside docs/ becomes part of the site.

Pages link to ../benchmarks/gpu.json, which readers of the repository can follow. A site has nothing above its root, so
the file is copied to benchmarks/gpu.json there, and the link turned to it.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the files that pages link to. One that does not exist is left to mkdocs, which names it as a broken link."""
    root = Path(config.config_file_path).parent
    for page in files.documentation_pages():
        for target in OUTSIDE.findall(page.content_string):
            if (root / target).is_file() and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(root / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes the ../ off links, since all pages lie in docs/ itself."""
    return OUTSIDE.sub(r"](\1", markdown)
