"""Graph, layout and mesh shape to a program; programs to better programs."""
