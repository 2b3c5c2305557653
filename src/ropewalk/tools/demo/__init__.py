"""`ropewalk demo`: a config in, a correct and fast RoPE out, with the proof of both."""
