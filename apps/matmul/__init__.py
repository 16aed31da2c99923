"""Distributed matrix multiplication: the paper's Appendix B, one product in 1, 2 or 3 dimensions.

``python -m apps.matmul`` prints for each partitioning what its three products (C, and the gradients
of A and B) send by formula, by prediction and by count.
"""
