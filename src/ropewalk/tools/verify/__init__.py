"""`ropewalk verify`: measures the claims, and shows them on one screen or in full."""

from ropewalk.tools.verify.command import verify as verify

__all__ = ["verify"]
