// The CUDA driver, opened at run time. No CUDA header is needed to build and no driver to import: the few types
// and entry points used are declared here, and libcuda.so.1 is opened by the first call that needs it.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace te_lite {

using CUresult = int;
using CUdevice = int;
struct CUuuid {
  unsigned char bytes[16];
};

// Values of the driver's public ABI.
constexpr CUresult kSuccess = 0;
constexpr int kAttributeMultiprocessorCount = 16;
constexpr int kAttributeComputeCapabilityMajor = 75;
constexpr int kAttributeComputeCapabilityMinor = 76;

// The driver cannot be used on this machine. what() is the reason, in words for the user.
class DriverUnavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Entry points under the names by which a program calls them. Where the exported symbol carries a version suffix
// (cuDeviceTotalMem_v2), driver.cpp resolves that one: the plain name is an older ABI with 32-bit sizes.
struct Driver {
  CUresult (*cuInit)(unsigned int flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int capacity, CUdevice device);
  CUresult (*cuDeviceGetUuid)(CUuuid* uuid, CUdevice device);
  CUresult (*cuDeviceTotalMem)(size_t* bytes, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDeviceCanAccessPeer)(int* can_access, CUdevice device, CUdevice peer);
  CUresult (*cuCtxGetCurrent)(void** context);
  CUresult (*cuCtxSetCurrent)(void* context);
  CUresult (*cuLaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                             void** parameters, void** extra);
};

// The initialised driver. The first call opens the library and runs cuInit; a failure is not remembered, so the
// next call tries again. Throws DriverUnavailable. A process forked after the first success must not call it:
// the driver does not survive a fork.
const Driver& driver();

struct DeviceInfo {
  std::string name;
  int ordinal;
  int compute_major;
  int compute_minor;
  size_t total_memory;  // bytes
  int multiprocessors;
  std::string uuid;  // 8-4-4-4-12 hexadecimal digits
};

struct DriverInfo {
  bool available = false;
  std::string reason;      // why not, when not available
  int driver_version = 0;  // 1000 * major + 10 * minor of the newest CUDA it serves; 0 when unknown
  std::vector<DeviceInfo> devices;
};

// What is there. Never throws for a machine without a driver or without a GPU.
DriverInfo driver_info();

// Whether a kernel or copy on device a can reach memory of device b. True for a == b. Throws DriverUnavailable,
// std::invalid_argument for an ordinal that does not exist.
bool can_access_peer(int a, int b);

}  // namespace te_lite
