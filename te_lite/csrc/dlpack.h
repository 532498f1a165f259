// What is needed of DLPack's C ABI (github.com/dmlc/dlpack).
#pragma once

#include <cstdint>

namespace te_lite {

struct DLTensor {
  void* data;
  int32_t device_type;  // 1 CPU, 2 CUDA
  int32_t device_id;
  int32_t dimensions;
  uint8_t type_code;  // 1: unsigned integer
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // null: dense
  uint64_t byte_offset;
};
static_assert(sizeof(DLTensor) == 48);

// Of version 1: how a library's tensors are seen from C.
struct DLPackExchangeAPI {
  uint32_t major, minor;
  void* unused[4];
  // A view of the tensor, valid while that lives. Not 0: a Python error is set.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
};

}  // namespace te_lite
