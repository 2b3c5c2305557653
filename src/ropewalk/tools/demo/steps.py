"""The progress of a command: a bar in a terminal, one line per step elsewhere."""

from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ropewalk.tools.output import trimmed

__all__ = ["Steps"]


class Steps:
    """Shows which step of a command runs. The bar disappears at the end.

    Args:
        console: Where progress is shown: standard error.
        total: The number of steps.

    >>> import io
    >>> lines = io.StringIO()
    >>> with Steps(Console(file=lines), total=2) as steps:
    ...     steps.begin("reading")
    >>> lines.getvalue()
    '[1/2] reading\\n'
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._begun = 0
        columns = (
            *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn()),
            *(MofNCompleteColumn(), TimeElapsedColumn()),
        )
        self._progress = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = None if self._progress is None else self._progress.add_task("starting", total=total)

    def __enter__(self) -> "Steps":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, text: str) -> None:
        """Show that the next step begins."""
        self._begun += 1
        if self._progress is None or self._task is None:
            self._console.print(f"[{self._begun}/{self._total}] {text}", markup=False, highlight=False, soft_wrap=True)
        else:
            self._progress.update(self._task, description=text, completed=self._begun - 1)

    def show(self, output: Console, *parts: RenderableType) -> None:
        """Print results on another console, which may be the same terminal: the bar is removed meanwhile."""
        if self._progress is not None:
            self._progress.stop()
        with trimmed(output):
            output.print(*parts, sep="\n", crop=False)
        # A pipe would keep the results until the end.
        output.file.flush()
        if self._progress is not None:
            self._progress.start()
