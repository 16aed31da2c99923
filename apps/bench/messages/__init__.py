"""Workers that time collectives: those of a mesh beside plain mpi4py's, and gloo's."""
