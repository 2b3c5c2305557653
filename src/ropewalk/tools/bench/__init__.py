"""`ropewalk bench`: times rotation and attention next to a copy and other libraries. Results are checked first."""
