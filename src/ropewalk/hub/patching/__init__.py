"""How `accelerate` finds what a loaded model computes, and what it puts in its place."""
