"""Encodings: position for a model, by embedding, rotation or bias; each has a name."""
