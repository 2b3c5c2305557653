"""A kernel layer for `use_kernels` of transformers: the rotation, in a folder that does not need ropewalk."""
