"""`ropewalk extend`: what it shows and writes."""
