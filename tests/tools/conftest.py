"""Fixtures of tests of commands that draw."""

import pytest
from matplotlib.figure import Figure

from ropewalk.tools import pictures


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    saved: list[Figure] = []
    save = pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, *more: (saved.append(figure), save(figure, *more)))
    return saved
