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
using CUdeviceptr = unsigned long long;
using CUallocation = unsigned long long;  // CUmemGenericAllocationHandle
struct CUuuid {
  unsigned char bytes[16];
};
struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int handle_types;
  CUmemLocation location;
  void* windows;
  unsigned char flags[8];
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
struct CUipcMemHandle {
  char bytes[64];
};
struct CUstreamMemOp {  // a wait or write in CUstreamBatchMemOpParams, a union
  int operation;
  CUdeviceptr address;
  unsigned long long value;  // 32-bit operations read the low half
  unsigned int flags;
  CUdeviceptr alias;
  unsigned long long pad;
};
static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, windows) == 16, "CUDA's ABI");
static_assert(sizeof(CUmemAccessDesc) == 12 && sizeof(CUipcMemHandle) == 64, "CUDA's ABI");
static_assert(sizeof(CUstreamMemOp) == 48 && offsetof(CUstreamMemOp, value) == 16, "CUDA's ABI");
static_assert(offsetof(CUstreamMemOp, flags) == 24 && offsetof(CUstreamMemOp, alias) == 32, "CUDA's ABI");

// Values of the driver's public ABI.
constexpr CUresult kSuccess = 0;
constexpr CUresult kDeinitialized = 4;
constexpr int kAllocationPinned = 1;
constexpr int kHandlePosixFd = 1;
constexpr int kLocationDevice = 1;
constexpr int kAccessReadWrite = 3;
constexpr int kGranularityMinimum = 0;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kCaptureNone = 0;
constexpr int kMemOpWait32 = 1;   // with flags 0: until (int32_t)(*address - value) >= 0
constexpr int kMemOpWrite32 = 2;  // with flags 0: after a fence for what the stream wrote before
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

  CUresult (*cuDevicePrimaryCtxRetain)(void** context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);

  CUresult (*cuMemGetAllocationGranularity)(size_t* bytes, const CUmemAllocationProp* prop, int option);
  CUresult (*cuMemCreate)(CUallocation* allocation, size_t bytes, const CUmemAllocationProp* prop,
                          unsigned long long flags);
  CUresult (*cuMemRelease)(CUallocation allocation);
  CUresult (*cuMemExportToShareableHandle)(void* handle, CUallocation allocation, int type, unsigned long long flags);
  CUresult (*cuMemImportFromShareableHandle)(CUallocation* allocation, void* handle, int type);
  CUresult (*cuMemAddressReserve)(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint,
                                  unsigned long long flags);
  CUresult (*cuMemAddressFree)(CUdeviceptr address, size_t bytes);
  CUresult (*cuMemMap)(CUdeviceptr address, size_t bytes, size_t offset, CUallocation allocation,
                       unsigned long long flags);
  CUresult (*cuMemUnmap)(CUdeviceptr address, size_t bytes);
  CUresult (*cuMemSetAccess)(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count);
  CUresult (*cuMemAlloc)(CUdeviceptr* address, size_t bytes);
  CUresult (*cuMemFree)(CUdeviceptr address);
  CUresult (*cuIpcGetMemHandle)(CUipcMemHandle* handle, CUdeviceptr address);
  CUresult (*cuIpcOpenMemHandle)(CUdeviceptr* address, CUipcMemHandle handle, unsigned int flags);
  CUresult (*cuIpcCloseMemHandle)(CUdeviceptr address);
  CUresult (*cuMemHostAlloc)(void** address, size_t bytes, unsigned int flags);
  CUresult (*cuMemFreeHost)(void* address);

  CUresult (*cuMemsetD8)(CUdeviceptr address, unsigned char value, size_t bytes);
  CUresult (*cuMemcpyAsync)(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream);
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr to, const void* from, size_t bytes, void* stream);
  CUresult (*cuMemcpyDtoHAsync)(void* to, CUdeviceptr from, size_t bytes, void* stream);
  CUresult (*cuStreamCreateWithPriority)(void** stream, unsigned int flags, int priority);
  CUresult (*cuStreamDestroy)(void* stream);
  CUresult (*cuStreamSynchronize)(void* stream);
  CUresult (*cuStreamIsCapturing)(void* stream, int* status);
  CUresult (*cuStreamBatchMemOp)(void* stream, unsigned int count, CUstreamMemOp* operations, unsigned int flags);
  CUresult (*cuEventCreate)(void** event, unsigned int flags);
  CUresult (*cuEventDestroy)(void* event);
  CUresult (*cuEventRecord)(void* event, void* stream);
  CUresult (*cuStreamWaitEvent)(void* stream, void* event, unsigned int flags);
};

// The initialised driver. The first call opens the library and runs cuInit; a failure is not remembered, so the
// next call tries again. Throws DriverUnavailable. A process forked after the first success must not call it:
// the driver does not survive a fork.
const Driver& driver();

// A device's primary context, torch's own, kept alive.
class PrimaryContext {
 public:
  // Makes it current on this thread for a scope: the caller may work for another device, or have none. Unchecked, so
  // that destructors can use it: whatever is called next fails where this did.
  class Scope {
   public:
    explicit Scope(void* context);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    void* before_ = nullptr;
    void* const context_;
  };

  explicit PrimaryContext(int ordinal);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  void* get() const { return context_; }

 private:
  CUdevice device_ = 0;
  void* context_ = nullptr;
};

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
