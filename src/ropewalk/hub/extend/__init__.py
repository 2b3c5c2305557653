"""Rules that extend the context of a model: their specs, their effects, config keys and command line flags."""
