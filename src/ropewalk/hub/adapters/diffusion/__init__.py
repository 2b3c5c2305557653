"""The fused norm and rotation in the transformers of diffusers. `rw.accelerate` uses it."""
