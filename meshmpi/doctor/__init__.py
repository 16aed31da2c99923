"""What is wrong with this machine, for programs of meshmpi: `meshmpi doctor`.

`facts` are gathered first, in processes of their own and under time limits, since whatever is asked may be broken;
`checks` turn facts into findings.  Nothing here imports NumPy, mpi4py or another package in the reporting process.
"""
