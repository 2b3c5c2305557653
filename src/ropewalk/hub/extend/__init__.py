"""Rules that extend the context of a model: specs, effects, config keys and flags."""
