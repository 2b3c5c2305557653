"""Functions that must return at once: a test of one fails where it waits forever, however busy the machine is."""

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["HANG", "outcome"]

# Seconds. What takes longer than this in place of milliseconds will never end.
HANG = 600


def outcome(function: Callable[[], Any]) -> Any:
    """The result of a function, or the exception that it raises."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANG)
    assert results, "it waits"
    return results[0]
