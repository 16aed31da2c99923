# Spack, from 1.0 on: put this file into a repository of your own as packages/py_meshmpi/package.py, then
#
#     spack develop --path /path/to/the/checkout py-meshmpi@0.1.0
#     spack install py-meshmpi ^openmpi        (or ^mpich, ^intel-oneapi-mpi)
#
# Before 1.0 spack.package has PythonPackage itself: leave the first import out.

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMeshmpi(PythonPackage):
    """Mesh-TensorFlow's idea on MPI: named-tensor graphs become SPMD programs."""

    license("MIT")

    version("0.1.0")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.24:", type=("build", "run"))
    # Spack builds mpi4py for the site's MPI, so that any version will do that has the functions.
    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("py-opt-einsum@3.3:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.4:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.5:", type=("build", "run"))
    depends_on("py-pydantic@2.6:", type=("build", "run"))
    depends_on("py-safetensors@0.4:", type=("build", "run"))
    depends_on("py-xxhash@3.0:", type=("build", "run"))
    depends_on("py-tomli@2:", when="^python@:3.10", type=("build", "run"))
