"""Tests that start ranks run on one worker: versions of pytest and pytest-xdist that do not match ignore groups."""

import os

import pytest


@pytest.mark.xdist_group("ranks")
def test_groups_are_known_to_the_workers(request):
    assert os.environ.get("PYTEST_XDIST_WORKER") is None or request.node.nodeid.endswith("@ranks")
