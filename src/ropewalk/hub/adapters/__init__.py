"""Adapters to other stacks: ONNX, MLX, JAX, timm, torchtitan. Each imports its stack only when it is used."""
