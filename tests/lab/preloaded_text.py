"""Reads the text of the lab when it is imported, for processes that are forked from one that has imported it."""

from ropewalk.lab.run import Run, make_task

make_task(Run("rope"))
