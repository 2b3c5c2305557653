"""`ropewalk bench`: rotation and attention timed against a copy and peers, after their results were checked."""
