"""Tables without the spaces that fill their last column, where they go into a file or a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

__all__ = ["trimmed"]


@contextmanager
def trimmed(console: Console) -> Iterator[None]:
    """Within it, what `console` prints loses the spaces at the ends of its lines, unless it is a terminal."""
    if console.is_terminal:
        yield
        return
    with console.capture() as caught:
        yield
    console.file.write("".join(f"{line.rstrip(' ')}\n" for line in caught.get().split("\n")[:-1]))
