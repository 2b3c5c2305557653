"""The C extension: its source, and how it is loaded."""
