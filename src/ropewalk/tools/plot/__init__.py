"""`ropewalk plot`: pictures of decay, frequencies, rotation, biases and sinusoids, and their numbers as JSON."""
