"""Math of the model: one module per op, each with a PyTorch reference and kernels.

On CPU every op runs a Numba kernel (`expertmesh_kernels.cpu`), without the GIL; on CUDA devices a
Triton kernel (`expertmesh_kernels.triton`), or what PyTorch has where that is one kernel too; on
other devices its reference. The kernels follow one rule that makes results independent of batch,
chunk and tile: every dot product is a single FP32 chain in ascending k, rounded once at the end.

Importing the package chooses the folder in which Numba keeps compiled kernels, so nothing may
import numba before it.
"""

from expertmesh_kernels.cache_dir import set_numba_cache_dir

set_numba_cache_dir()
