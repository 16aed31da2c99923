"""What is wrong with this machine, for programs of meshmpi: `meshmpi doctor`.

`facts` are gathered first, in processes of their own and under time limits, since whatever is asked
may be broken; each file of `checks` then reads facts and makes findings.  Nothing here imports
NumPy, mpi4py or another package in the reporting process.
"""
