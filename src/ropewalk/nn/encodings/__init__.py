"""Position encodings for a model: embeddings, rotations and biases, each with a name."""
