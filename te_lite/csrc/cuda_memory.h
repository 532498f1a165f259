// Device memory that other processes can map: a rank's arena, or a peer's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "driver.h"

namespace te_lite {

// All functions throw DriverUnavailable and DriverError. New memory is zero.
class CudaMemory {
 public:
  // Virtual memory management: passed on as a file descriptor. bytes are rounded up to the device's granularity.
  static std::unique_ptr<CudaMemory> vmm(int device, size_t bytes);
  static std::unique_ptr<CudaMemory> import_fd(int device, int fd, size_t bytes);  // device: the one that will reach it
  // The older way, where descriptors cannot be passed on: a handle of 64 bytes.
  static std::unique_ptr<CudaMemory> ipc(int device, size_t bytes);
  static std::unique_ptr<CudaMemory> open_ipc(int device, const std::string& handle, size_t bytes);
  ~CudaMemory();

  uint64_t address() const { return address_; }
  size_t bytes() const { return bytes_; }
  int export_fd() const;  // the caller closes it
  std::string ipc_handle() const;

 private:
  enum class Kind { kVmm, kIpc, kOpenedIpc };
  CudaMemory(Kind kind, int device, size_t bytes);
  CUmemAllocationProp properties() const;
  void map();
  void zero();

  const Kind kind_;
  const int device_;
  const Driver& cuda_;
  PrimaryContext context_;
  size_t bytes_;
  // What has been taken so far; the destructor gives it back.
  CUdeviceptr address_ = 0;
  CUallocation allocation_ = 0;
  bool created_ = false;
  bool mapped_ = false;
};

}  // namespace te_lite
