"""The rotation of q and k: one file per backend."""
