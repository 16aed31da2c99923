"""The heat equation on a grid in 1, 2 or 3 dimensions, split in every dimension over a mesh.

``python -m apps.heat`` checks each run against one rank and its halo traffic against a formula.
"""
