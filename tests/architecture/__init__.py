"""Tests of the source itself: imports, files, public names, private APIs."""
