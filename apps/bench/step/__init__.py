"""One training step of the yardstick model in several systems, and its bare matrix products.

Each system is a worker with a process (or two) of its own; `rounds` lets them take turns.
"""
