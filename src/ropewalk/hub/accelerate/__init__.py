"""Replaces the rotation of a loaded transformers model by the fused one."""
