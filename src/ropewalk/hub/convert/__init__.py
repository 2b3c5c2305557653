"""Checkpoints converted from one pairing to the other."""
