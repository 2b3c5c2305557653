"""Statements of five notes on RoPE, one chapter per subject. Sources are file names."""
