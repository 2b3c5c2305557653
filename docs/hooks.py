"""Hooks of the docs build: files outside docs/, formulas, the version, and a check of the API reference.

Pages link to files such as ../benchmarks/gpu.json, which works in the repository. The site has nothing above its root,
so the file is copied to benchmarks/gpu.json inside the site, and the link is changed to it.

explore.html is the page of `ropewalk explore`, with the bundled configs.

Formulas are blocks of LaTeX with the language `math`, which code hosts show too. The site contains them as MathML:
browsers show it without a script or a font from another server.
"""

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter
from api_names import documented_names, missing_from_pages, public_names, without_directive
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from ropewalk.tools.explore.page import page_data, page_html

LINK = re.compile(r"(?<=\]\()[^)#:\s]+")
# What a browser loads with a page. Links that a reader follows may lead anywhere.
LOADED = re.compile(r'<(?:script|img|iframe)\b[^>]*\bsrc="https?:|<link\b[^>]*\bstylesheet[^>]*"https?:')


def on_config(config: Any) -> Any:
    """Register the formulas, and put the version into the footer."""
    fence = {"name": "math", "class": "formula", "format": formula}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    project = tomllib.loads((root_of(config) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = f"{project['name']} {project['version']}, {project['license']}"
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the explorer and the files that pages link to. mkdocs reports a missing file as a broken link."""
    for page in files.documentation_pages():
        for target in targets_outside(page.content_string, page.src_uri).values():
            if (root_of(config) / target).is_file() and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(root_of(config) / target)))
    files.append(File.generated(config, "explore.html", content=page_html(page_data())))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Change links to files outside docs/ into links to their copies in the site."""
    outside = targets_outside(markdown, page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(
        lambda link: posixpath.relpath(outside[link[0]], folder or ".") if link[0] in outside else link[0], markdown
    )


def on_post_page(output: str, *, page: Any, **_: Any) -> None:
    """Raise if a page loads anything from another server: the site is read offline too."""
    if loaded := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another server: {loaded[0]}...")


def on_post_build(config: Any) -> None:
    """Raise if a public name, or a parameter of one, is not in the API reference."""
    documented = documented_names(Path(config.docs_dir, "api"))
    pages = {path.stem: path.read_text(encoding="utf-8") for path in Path(config.site_dir, "api").glob("*.html")}
    if missing := without_directive(public_names(), documented) + missing_from_pages(pages, documented):
        raise PluginError("the API reference lacks: " + "; ".join(missing))


def targets_outside(markdown: str, page: str) -> dict[str, str]:
    """The links of a page that leave docs/, each with its path from the root of the repository.

    >>> targets_outside("[a](../benchmarks/gpu.json) [b](../rotary.md)", "api/rotary.md")
    {}
    >>> targets_outside("[a](../benchmarks/gpu.json) [b](rotary.md)", "gpu.md")
    {'../benchmarks/gpu.json': 'benchmarks/gpu.json'}
    """
    return dict(_outside(markdown, posixpath.dirname(page)))


def _outside(markdown: str, folder: str) -> Iterator[tuple[str, str]]:
    for link in LINK.findall(markdown):
        target = posixpath.normpath(posixpath.join(folder, link))
        if target.startswith("../"):
            yield link, target.removeprefix("../")


def formula(source: str, *_: Any, **__: Any) -> str:
    """The HTML of a formula: a block that scrolls if it is wider than the page."""
    return f'<div class="formula">{latex2mathml.converter.convert(source, display="block")}</div>'


def root_of(config: Any) -> Path:
    return Path(config.config_file_path).parent
