"""The page as one HTML file: markup, style, scripts and data, with a policy that allows nothing else."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from ropewalk.hub.bundled import bundled_config, bundled_names
from ropewalk.tools.explore.lab_curves import installed_curves
from ropewalk.tools.explore.presets import Preset, describe_rules, read_config, with_distinct_names

__all__ = ["FIRST", "SCRIPTS", "bundled_presets", "page_data", "page_html"]

_BROWSER = Path(__file__).parent / "browser"
# In this order: a script uses those before it.
SCRIPTS = ("rules.js", "curves.js", "specs.js", "chart.js", "fields.js", "panels.js", "main.js")
# The preset that is shown if no config is passed.
FIRST = "llama-3.1-8b"


def bundled_presets() -> list[Preset]:
    """The rotations of the bundled configs."""
    return [preset for name in bundled_names() for preset in read_config(str(bundled_config(name)), None)[0]]


def page_data(presets: list[Preset] | None = None, biases: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What the page shows: the presets of configs before those of bundled configs, the rules, and curves of the lab.

    Args:
        presets: Presets of the configs that were passed. The first one is shown first.
        biases: What `describe_bias` returned for models with ALiBi or T5's bias.
    """
    passed = presets or []
    offered = with_distinct_names([*passed, *bundled_presets()])
    first = 0 if passed else next(i for i, preset in enumerate(offered) if preset.name == FIRST)
    return {
        "rules": describe_rules(),
        "presets": [preset.as_json() for preset in offered],
        "first": first,
        "biases": biases or [],
        "lab": installed_curves(),
    }


def page_html(data: dict[str, Any]) -> str:
    """The HTML file. No text of `data` can end its element or become markup."""
    markup, style, *scripts = (
        (_BROWSER / name).read_text(encoding="utf-8") for name in ("index.html", "style.css", *SCRIPTS)
    )
    parts = {
        "<!-- policy -->": f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, scripts)}">',
        "<!-- style -->": f"<style>{style}</style>",
        "<!-- data -->": f'<script type="application/json" id="data">{_as_script(data)}</script>',
        "<!-- scripts -->": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    for place, content in parts.items():
        before, after = markup.split(place)
        markup = before + content + after
    return markup


def _as_script(data: object) -> str:
    """JSON whose text has none of the characters with which markup begins or ends."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(style: str, scripts: list[str]) -> str:
    """The content security policy: only these scripts and this style, no request, no evaluation of text."""
    allowed = {"script-src": scripts, "style-src": [style]}
    rules = [f"{kind} {' '.join(map(_hash, texts))}" for kind, texts in allowed.items()]
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
