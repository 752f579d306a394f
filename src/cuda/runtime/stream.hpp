// cudaStream_t without a CUDA header, for declarations that plain C++ reads too.
// Included by the headers of the kernel folders.
#pragma once

struct CUstream_st;

namespace plait::cuda {
using Stream = CUstream_st*;
}
