"""What no config says: how each family of models rotates."""
