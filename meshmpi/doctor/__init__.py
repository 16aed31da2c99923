"""`meshmpi doctor`: what is wrong with this machine for programs of meshmpi.

First `facts` are gathered in separate processes with time limits, because any part may be broken; then `checks` turn
facts into findings. The reporting process imports neither NumPy nor mpi4py nor other packages.
"""
