"""Families of models: the properties of their rotations that configs do not contain."""
