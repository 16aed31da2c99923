"""The two-layer example of section 8 of the Mesh-TensorFlow paper, in all its layouts.

``python -m apps.two_layer`` prints the paper's Table 1, and beside each formula what the program
predicts and what a run really did.
"""
