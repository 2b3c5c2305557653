"""The former place of `trimmed`, until `ropewalk.tools.inspect` and `ropewalk.tools.extend` import it from output."""

from ropewalk.tools.output import trimmed

__all__ = ["trimmed"]
