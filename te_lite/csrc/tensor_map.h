// What kernels that are compiled at run time share with their hosts; read by both compilers.
#pragma once

namespace te_lite {

constexpr int kBoxBytes = 128;           // a row of a box that the tensor-copy unit moves: elements of K, or of a row
constexpr int kBlockShared = 227 << 10;  // all that a block can have

struct alignas(64) TensorMap {
  char bytes[128];
};

}  // namespace te_lite
