"""Marks for tests that do on purpose what ropewalk warns about."""

import pytest


def meant(argument: str) -> pytest.MarkDecorator:
    """Ignore warnings about an argument: `cu_seqlens` that end before the last token, `positions` that go back, or a
    `key_mask` that hides all keys of a sequence."""
    return pytest.mark.filterwarnings(rf"ignore:asked.\s+[\w.]+\({argument}=:ropewalk.errors.RopewalkWarning")
