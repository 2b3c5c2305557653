"""`ropewalk inspect`: what it shows, compares and draws."""
