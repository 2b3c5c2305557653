"""Linear attention on a GPU with stored rotated features, which matrix products then read from memory.

For heads of more than 64 features or values this is faster than computing the features again: their tiles do not fit
into registers. It has no decay and no bias, and always a denominator.
"""
