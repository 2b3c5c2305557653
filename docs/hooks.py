"""Hooks of the docs build: files outside docs/ that a page links to become part of the site.

Pages link to files such as ../benchmarks/gpu.json, which works in the repository. The site has nothing above its root,
so the file is copied to benchmarks/gpu.json inside the site, and the link is changed to it.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files that pages link to. mkdocs reports a file that does not exist as a broken link."""
    root = Path(config.config_file_path).parent
    for page in files.documentation_pages():
        for target in OUTSIDE.findall(page.content_string):
            if (root / target).is_file() and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(root / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove ../ from links. All pages are in docs/ itself."""
    return OUTSIDE.sub(r"](\1", markdown)
