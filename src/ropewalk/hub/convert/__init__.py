"""Checkpoints, from one pairing to the other."""
