"""How `convert` reads a checkpoint, moves its rows, writes it whole or not at all, and proves it."""
