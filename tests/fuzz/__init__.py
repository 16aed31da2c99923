"""Random graphs, layouts, meshes and options against a float64 oracle: ``python -m tests.fuzz``."""
