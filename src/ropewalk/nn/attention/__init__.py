"""Softmax attention: the layer, the score computation, the projections and the cache."""
