// The CUDA driver, opened at run time. No CUDA header is needed to build and no driver to import: the few types
// and entry points used are declared here, and libcuda.so.1 is opened by the first call that needs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace te_lite {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUallocation = unsigned long long;  // CUmemGenericAllocationHandle
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
struct CUstreamMemOp {  // a wait or write in CUstreamBatchMemOpParams, a union
  int operation;
  CUdeviceptr address;
  unsigned long long value;  // 32-bit operations read the low half
  unsigned int flags;
  CUdeviceptr alias;
  unsigned long long pad;
};
struct CUmemcpyPlace {  // one side of CUDA_MEMCPY2D
  size_t x;
  size_t y;
  int type;
  const void* host;
  CUdeviceptr address;
  void* array;
  size_t pitch;
};
struct CUmemcpy2D {
  CUmemcpyPlace from;
  CUmemcpyPlace to;
  size_t width;  // bytes
  size_t rows;
};
struct CUlaunchAttribute {
  int id, pad, value;
  char rest[60];
};
struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  CUlaunchAttribute* attributes;
  unsigned count;
};
static_assert(sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56, "CUDA's ABI");
static_assert(sizeof(CUmemcpyPlace) == 56 && sizeof(CUmemcpy2D) == 128, "CUDA's ABI");
static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, windows) == 16, "CUDA's ABI");
static_assert(sizeof(CUmemAccessDesc) == 12, "CUDA's ABI");
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
constexpr int kMemoryUnified = 4;  // the address says where
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kCaptureNone = 0;
constexpr int kMemOpWrite32 = 2;           // with flags 0: after a fence for what the stream wrote before
constexpr int kFunctionDynamicShared = 8;  // the most that a launch may ask for
constexpr int kLaunchEarly = 6;            // programmatic stream serialization
constexpr int kMapUint8 = 0;
constexpr int kMapUint16 = 1;
constexpr int kMapSwizzle64 = 2, kMapSwizzle128 = 3;
constexpr int kMapPromote128 = 2;  // what a miss brings to L2, bytes

// A failed driver call: it names the call, the error and what the driver says about it.
struct DriverError : std::runtime_error {
  DriverError(CUresult code, const std::string& message) : std::runtime_error(message), code(code) {}
  const CUresult code;
};

// The driver cannot be used on this machine. what() is the reason, in words for the user.
struct DriverUnavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The driver's entry points: the name by which a program calls one, what its symbol has behind that, the parameters.
// Where that is a version, the plain name is an older ABI, with 32-bit sizes for instance.
#define TE_LITE_ENTRIES(X) \
  X(cuInit, "", (unsigned int flags)) \
  X(cuDriverGetVersion, "", (int* version)) \
  X(cuGetErrorName, "", (CUresult error, const char** name)) \
  X(cuGetErrorString, "", (CUresult error, const char** text)) \
  X(cuDeviceGetCount, "", (int* count)) \
  X(cuDeviceGet, "", (CUdevice* device, int ordinal)) \
  X(cuCtxGetCurrent, "", (void** context)) \
  X(cuCtxSetCurrent, "", (void* context)) \
  X(cuLaunchKernelEx, "", (const CUlaunchConfig* config, void* function, void** parameters, void** extra)) \
  X(cuModuleLoadData, "", (void** module, const void* image)) \
  X(cuModuleGetFunction, "", (void** function, void* module, const char* name)) \
  X(cuFuncSetAttribute, "", (void* function, int attribute, int value)) \
  X(cuTensorMapEncodeTiled, "", \
    (void* map, int kind, unsigned dimensions, CUdeviceptr address, const unsigned long long* sizes, \
     const unsigned long long* strides, const unsigned* box, const unsigned* steps, int interleave, int swizzle, \
     int promotion, int fill)) \
  X(cuDevicePrimaryCtxRetain, "", (void** context, CUdevice device)) \
  X(cuDevicePrimaryCtxRelease, "_v2", (CUdevice device)) \
  X(cuThreadExchangeStreamCaptureMode, "", (int* mode)) \
  X(cuMemGetAllocationGranularity, "", (size_t* bytes, const CUmemAllocationProp* prop, int option)) \
  X(cuMemCreate, "", (CUallocation* allocation, size_t bytes, const CUmemAllocationProp* prop, uint64_t flags)) \
  X(cuMemRelease, "", (CUallocation allocation)) \
  X(cuMemExportToShareableHandle, "", (void* handle, CUallocation allocation, int type, uint64_t flags)) \
  X(cuMemImportFromShareableHandle, "", (CUallocation* allocation, void* handle, int type)) \
  X(cuMemAddressReserve, "", (CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint, uint64_t flags)) \
  X(cuMemAddressFree, "", (CUdeviceptr address, size_t bytes)) \
  X(cuMemMap, "", (CUdeviceptr address, size_t bytes, size_t offset, CUallocation allocation, uint64_t flags)) \
  X(cuMemUnmap, "", (CUdeviceptr address, size_t bytes)) \
  X(cuMemsetD8Async, "", (CUdeviceptr address, unsigned char value, size_t bytes, void* stream)) \
  X(cuMemSetAccess, "", (CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count)) \
  X(cuMemHostAlloc, "", (void** address, size_t bytes, unsigned int flags)) \
  X(cuMemFreeHost, "", (void* address)) \
  X(cuMemsetD8, "_v2", (CUdeviceptr address, unsigned char value, size_t bytes)) \
  X(cuMemcpyAsync, "", (CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream)) \
  X(cuMemcpy2DAsync, "_v2", (const CUmemcpy2D* copy, void* stream)) \
  X(cuMemcpyDtoHAsync, "_v2", (void* to, CUdeviceptr from, size_t bytes, void* stream)) \
  X(cuStreamCreateWithPriority, "", (void** stream, unsigned int flags, int priority)) \
  X(cuStreamDestroy, "_v2", (void* stream)) \
  X(cuStreamSynchronize, "", (void* stream)) \
  X(cuStreamIsCapturing, "", (void* stream, int* status)) \
  X(cuStreamBatchMemOp, "_v2", (void* stream, unsigned int count, CUstreamMemOp* operations, unsigned int flags)) \
  X(cuEventCreate, "", (void** event, unsigned int flags)) \
  X(cuEventDestroy, "_v2", (void* event)) \
  X(cuEventRecord, "", (void* event, void* stream)) \
  X(cuStreamWaitEvent, "", (void* stream, void* event, unsigned int flags))

struct Driver {
#define TE_LITE_FIELD(name, version, parameters) CUresult(*name) parameters;
  TE_LITE_ENTRIES(TE_LITE_FIELD)
#undef TE_LITE_FIELD
};

// The driver, opened but not initialised: for what works without cuInit. Throws DriverUnavailable.
const Driver& opened_driver();

// The initialised driver. The first call opens the library and runs cuInit; a failure is not remembered, so the
// next call tries again. Throws DriverUnavailable. A process forked after the first success must not call it:
// the driver does not survive a fork.
const Driver& driver();

inline void check(CUresult result, const char* call) {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  // Both leave a null pointer for a code that this driver does not know.
  opened_driver().cuGetErrorName(result, &name);
  opened_driver().cuGetErrorString(result, &text);
  throw DriverError(result, std::string(call) + " failed: " + (name ? name : "unknown error") + " (" +
                                std::to_string(result) + "): " + (text ? text : "no description"));
}

// TE_LITE_CHECK(cuDeviceGet, &device, 0) calls driver().cuDeviceGet and throws DriverError where that fails.
#define TE_LITE_CHECK(entry, ...) ::te_lite::check(::te_lite::driver().entry(__VA_ARGS__), #entry)

// A device's primary context, torch's own, kept alive.
class PrimaryContext {
 public:
  // Makes it current on this thread for a scope: the caller may work for another device, or have none. Unchecked, so
  // that destructors can use it: whatever is called next fails where this did.
  class Scope {
   public:
    explicit Scope(const PrimaryContext& context) : context_(context.context_) {
      driver().cuCtxGetCurrent(&before_);
      if (before_ != context_) driver().cuCtxSetCurrent(context_);
    }
    ~Scope() {
      if (before_ != context_) driver().cuCtxSetCurrent(before_);
    }
    Scope(const Scope&) = delete;

   private:
    void* before_ = nullptr;
    void* const context_;
  };

  explicit PrimaryContext(int ordinal);
  ~PrimaryContext() { driver().cuDevicePrimaryCtxRelease(device_); }
  PrimaryContext(const PrimaryContext&) = delete;

 private:
  CUdevice device_ = 0;
  void* context_ = nullptr;
};

}  // namespace te_lite
