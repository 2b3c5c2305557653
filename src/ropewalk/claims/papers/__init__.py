"""Statements of papers on RoPE that can be checked in seconds, one chapter per subject."""
