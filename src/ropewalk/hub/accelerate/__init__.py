"""The fused rotation, in a model of transformers that is already loaded."""
