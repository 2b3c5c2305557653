"""Statements of papers on RoPE that take seconds to check, a chapter a subject."""
