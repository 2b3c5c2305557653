"""`ropewalk inspect`: the command, its tables and its picture."""
