"""The former place of `ropewalk.tools.pictures`, until `ropewalk.tools.inspect` imports that."""

from ropewalk.tools.pictures import *  # noqa: F403
