"""Linear attention on a GPU with stored rotated features, which matrix products then read from memory.

For heads of more than 64 features or values this is faster than computing the features again: their tiles do not fit
into registers. A causal decay per head is supported, and results without a denominator. A decay per token and a bias
within a band are not.
"""
