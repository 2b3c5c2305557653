"""Softmax attention: the layer, its scores, projections and cache."""
