"""The output of `ropewalk demo`: one function per section, at most 80 columns wide."""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ropewalk.hub.bundled import bundled_names
from ropewalk.hub.configs.model import Lengths
from ropewalk.hub.inspection import Inspection, Layer
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.inspect.sheet import features_of, number, pairing_of, parameters_of

if TYPE_CHECKING:
    from ropewalk.claims import Entry
    from ropewalk.tools.demo.agreement import Agreement
    from ropewalk.tools.demo.speed import Speed

__all__ = [
    "agreement",
    "code_for",
    "extension",
    "main_layer",
    "module",
    "next_commands",
    "rope",
    "speed",
    "statements",
]

# The width of lines of text, and their indentation.
WIDTH, INDENT = 80, 3


def main_layer(inspection: Inspection) -> tuple[Layer, RopeSpec]:
    """The layer type to demonstrate, with its spec: the first that rotates, and has no window if there is one.

    >>> from ropewalk.hub.inspection import inspect_model
    >>> main_layer(inspect_model({"model_type": "llama", "head_dim": 8}))[0].kind
    'plain RoPE'
    """
    rotating = [(layer, layer.spec) for layer in inspection.layers if layer.spec is not None]
    return next((pair for pair in rotating if "sliding" not in pair[0].name), rotating[0])


def _section(title: str, *parts: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), *parts, "")


@dataclass(frozen=True)
class _Paragraph:
    """Text with an indentation, at most 80 columns wide. Words such as paths are never broken."""

    text: str
    style: str
    indent: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin, width = " " * self.indent, max(2 * self.indent, min(WIDTH, options.max_width))
        wrapper = textwrap.TextWrapper(width, margin, margin, break_long_words=False, break_on_hyphens=False)
        yield Text(wrapper.fill(self.text), style=self.style, no_wrap=True, overflow="ignore")


def _wrapped(text: str, style: str = "", indent: int = INDENT) -> RenderableType:
    return _Paragraph(text, style, indent)


def _verbatim(line: str) -> Text:
    """A line that is never wrapped, so that it can be copied."""
    return Text(f"{' ' * INDENT}{line}", no_wrap=True, overflow="ignore")


def _commented(line: str, comment: str) -> str:
    """A line with a comment, if there is one and the line has space for it."""
    whole = f"{line}  # {comment}"
    return whole if comment and len(whole) <= WIDTH - INDENT else line


def _table(*columns: str) -> Table:
    """A table whose first column is text and whose other columns are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for position, name in enumerate(columns):
        table.add_column(name, justify="right" if position else "left", no_wrap=position > 0)
    return table


def _indented(table: Table) -> RenderableType:
    return Padding(table, (0, 0, 0, INDENT))


def _length(length: int | None) -> str:
    return "not in the config" if length is None else number(length)


def _lengths(lengths: Lengths) -> dict[str, str]:
    """The lengths, in the words of `ropewalk inspect`."""
    if lengths.trained == lengths.configured:
        return {"trained length": _length(lengths.trained)}
    return {"original length": _length(lengths.trained), "context length": _length(lengths.configured)}


def rope(inspection: Inspection, origin: str = "") -> RenderableType:
    """What the RoPE of the model is, in eight lines. `origin` is a remark on the config, if there is one."""
    model, (layer, spec) = inspection.model, main_layer(inspection)
    view, lengths = layer.views[-1], model.lengths
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    others = "; ".join(f"{other.title}: {other.kind}" for other in inspection.layers if other is not layer)
    rows = {
        "config": origin,
        "layers": others and f"{layer.name}; {others}",
        "rule": parameters_of(spec),
        "pairing": pairing_of(spec),
        "features": features_of(spec),
        **_lengths(lengths),
        "pairs": ", ".join(f"{count} {kind}" for kind, count in view.counted().items()),
        "wavelengths": f"{number(view.wavelengths.min())} to {number(view.wavelengths.max())} positions",
        "warnings": ", ".join(dict.fromkeys(name for name, _ in model.warnings)),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return _section(f"1. The RoPE of {model.name}: {layer.kind}", _indented(table))


def code_for(config: str, layer: str, pairing: str | None) -> list[str]:
    """The code that makes the module, as one would type it.

    Args:
        config: The path of the config.
        layer: The layer type. "" if all layers have the same rotation.
        pairing: The pairing, if the user specified one.

    >>> print(*code_for("config.json", "full_attention", None), sep="\\n")
    import ropewalk as rw
    spec = rw.load_spec("config.json")["full_attention"]
    rope = rw.RotaryEmbedding(spec)
    """
    options = "" if pairing is None else f", pairing={json.dumps(pairing)}"
    selected = f"[{json.dumps(layer)}]" if layer else ""
    # JSON strings are Python strings.
    load = f"spec = rw.load_spec({json.dumps(config)}{options}){selected}"
    return ["import ropewalk as rw", load, "rope = rw.RotaryEmbedding(spec)"]


def module(code: Sequence[str]) -> RenderableType:
    """The code of the module."""
    comments = ("", 'or with angles="exact"', "in the model: q, k = rope(q, k)")
    return _section("2. The module", *map(_verbatim, map(_commented, code, comments)))


def agreement(rows: "Sequence[Agreement]", not_shown: str) -> RenderableType:
    """The errors at each position, and their meaning.

    Args:
        rows: The errors, by position.
        not_shown: Why the module is not compared with transformers' formula. Empty if it is.
    """
    columns = {
        "as loaded vs\ntransformers": [row.to_formula for row in rows],
        "transformers\nvs exact": [row.formula for row in rows],
        'angles="exact"\nvs exact': [row.exact for row in rows],
    }
    shown = {name: errors for name, errors in columns.items() if None not in errors}
    wrong = not all(row.agrees for row in rows)
    table = _table("position", *shown, *([""] if wrong else []))
    for row, *errors in zip(rows, *shown.values(), strict=True):
        cells = [f"{error:.1e}" if error else "0" for error in errors]
        table.add_row(number(row.position), *cells, *([] if row.agrees or not wrong else ["WRONG"]))
    text = _meaning(rows, not_shown, wrong)
    return _section(
        "3. Agreement: largest error of a rotated pair, relative to its norm", _indented(table), _wrapped(text)
    )


def _meaning(rows: "Sequence[Agreement]", not_shown: str, wrong: bool) -> str:
    """What the errors mean, in one paragraph."""
    if wrong:
        return "The module does not agree with what the config describes. Please report this, with the config."
    if not_shown:
        return (
            f"Agreement with transformers is not shown for this model: {not_shown}. Exact is the rotation of the spec"
            " in float64."
        )
    equal = "bit for bit" if all(row.same_tables for row in rows) else "within float32 roundings"
    return (
        f'As loaded, cos and sin equal transformers\' formula {equal}; angles="exact" leaves float32 roundings.'
        " Both references are separate code."
    )


def speed(rows: "Sequence[Speed]", setting: str) -> RenderableType:
    """The times of each case, and their ratio. `setting` is the device, the dtype and the sizes, in words."""
    table = _table("", "ropewalk", "plain formula", "ratio")
    for row in rows:
        table.add_row(row.case, _time(row.ropewalk_ms), _time(row.formula_ms), f"{row.ratio:.1f} ×")
    return _section(f"4. Speed (wall clock): {setting}", _indented(table))


def _time(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 1 else f"{1e3 * ms:.3g} µs"


def extension(title: str, lines: Sequence[str]) -> RenderableType:
    """The extension of the context: one paragraph per line."""
    return _section(f"5. {title}", *map(_wrapped, lines))


def statements(entries: "Sequence[tuple[Entry, str]]") -> RenderableType:
    """The false statements, each with its source and what was measured."""
    lines: list[RenderableType] = []
    for entry, source in entries:
        label = "WRONG VERDICT, measured" if entry.contradicted else "measured"
        measured = f"{label}: {entry.finding.measured}"
        method = f" ({entry.claim.method})"
        # A short figure needs its method to be understood.
        measured += method if len(measured + method) <= WIDTH - 2 * INDENT else ""
        lines += [
            _wrapped(
                f"{source[0].upper() + source[1:] if source.startswith('note') else source}: {entry.claim.statement}"
            ),
            _wrapped(measured, style="red", indent=2 * INDENT),
        ]
    return _section("6. Three false statements, paraphrased (all statements: ropewalk verify)", *lines)


def next_commands(config: str, to: int | None, pictures: str) -> RenderableType:
    """What to type next, and the pictures. `to` is the extended length, if the model can be extended."""
    path, names = shlex.quote(config), [name for name in bundled_names() if name not in config][:3]
    # `make demo` installs into .venv, which need not be active.
    called = Path(sys.argv[0])
    program = str(called) if called.name == "ropewalk" and shutil.which("ropewalk") is None else "ropewalk"
    commands = [(f"{program} inspect {path}", "frequencies and pitfalls")]
    if to is not None:
        commands.append((f"{program} extend {path} --to {to}", "the keys to set"))
    commands += [
        (f"{program} demo CONFIG", f"a config.json, or {', '.join(names)}"),
        ("rw.accelerate(model)", "the fused rotation in a loaded model of transformers"),
    ]
    lines = [_verbatim(_commented(command, text)) for command, text in commands]
    return Group(Text("7. What to type next", style="bold"), *lines, _wrapped(f"pictures: {pictures}"))
