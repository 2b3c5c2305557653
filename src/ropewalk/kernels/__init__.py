"""Fast versions of the functions in `reference`, by several backends."""

# Importing the registry also registers the built-in backends.
from ropewalk.kernels import backends as backends
