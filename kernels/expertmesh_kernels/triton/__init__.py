"""Triton kernels, the ops on CUDA devices. One module per op; importing one imports triton.

Ops import these modules when they first meet a CUDA tensor, so a process without a GPU never loads
triton. Functions take tensors of one device, launch, and return without waiting: no copy to the
host, no memory whose size depends on values, grids from upper bounds. So all of them can be
captured in a CUDA graph. With TRITON_INTERPRET=1 they run on CPU tensors.

Bits of a row do not depend on the batch. A product's chain over K is cut into the same steps for
any number of rows, and is never split among programs. Tiles of different heights use the same
matrix instruction (`tiles`), whose chains do not depend on the height.

Importing the package chooses the folder in which Triton keeps compiled kernels.
"""

from expertmesh_kernels.cache_dir import set_triton_cache_dir

set_triton_cache_dir()
