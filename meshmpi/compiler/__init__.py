"""Lowers graph, layout and mesh shape to a program, and optimises programs."""
