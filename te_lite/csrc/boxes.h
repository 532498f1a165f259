// Kernels that are compiled at run time: loading them, and describing the matrices that they read in boxes.
#pragma once

#include <cstdint>
#include <string>

#include "driver.h"
#include "launch.h"
#include "tensor_map.h"

namespace te_lite {

// Boxes of [rows, columns], 64 or 128 bytes wide, swizzled over that width. apart: elements from a row of the matrix
// to the next; 0: columns.
inline TensorMap boxes(uint64_t address, unsigned bytes, int rows, int columns, unsigned box_rows, unsigned wide,
                       int apart = 0) {
  TensorMap map;
  const unsigned long long sizes[] = {static_cast<unsigned long long>(columns), static_cast<unsigned long long>(rows)};
  const unsigned long long stride = 1ull * (apart ? apart : columns) * bytes;
  const unsigned box[] = {wide, box_rows}, steps[] = {1, 1};
  TE_LITE_CHECK(cuTensorMapEncodeTiled, &map, bytes == 1 ? kMapUint8 : kMapUint16, 2, address, sizes, &stride, box,
                steps, 0, wide * bytes == 64 ? kMapSwizzle64 : kMapSwizzle128, kMapPromote128, 0);
  return map;
}

// A kernel of a cubin, which may take all of a block's shared memory, for a device; for the life of the process.
inline Kernel load_kernel(const PrimaryContext& device, const std::string& cubin, const char* name, unsigned threads) {
  const PrimaryContext::Scope scope(device);
  void *module = nullptr, *function = nullptr;
  TE_LITE_CHECK(cuModuleLoadData, &module, cubin.data());
  TE_LITE_CHECK(cuModuleGetFunction, &function, module, name);
  TE_LITE_CHECK(cuFuncSetAttribute, function, kFunctionDynamicShared, kBlockShared);
  return Kernel(reinterpret_cast<uint64_t>(function), threads, kBlockShared, "", true);
}

}  // namespace te_lite
