"""`ropewalk lab`: trains small models, compares encodings, and shows tables and pictures."""
