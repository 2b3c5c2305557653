"""`ropewalk extend`: the command and its output."""
