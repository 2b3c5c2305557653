"""RMSNorm of q and k and their rotation in one pass: one file per backend."""
