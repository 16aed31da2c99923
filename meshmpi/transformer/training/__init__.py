"""Training: data, configuration, checkpoints, metrics, the loop and decoding.

This is the last room: no other room may import it.
"""
