"""Statements of the five notes that this library grew from, a chapter a subject. Sources are their file names."""
