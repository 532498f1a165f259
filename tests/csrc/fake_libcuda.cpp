// A stand-in for libcuda.so.1 with two devices, so that te_lite._C's whole path from dlopen to Python is tested
// on a machine without a GPU. FAKE_CUDA_FAIL=<entry> makes that entry return 3 (not initialised).
// Device memory is host memory and streams run at once: a stream that waits holds the thread that issues.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {
bool initialised = false;

int result(const char* entry) {
  const char* fail = std::getenv("FAKE_CUDA_FAIL");
  return fail && !std::strcmp(fail, entry) ? 3 : 0;
}
int needs_init(const char* entry) { return initialised ? result(entry) : 3; }

std::atomic<int> live{0};  // what was taken from the driver and not given back
void* wait_kernel = nullptr;
std::string calls;  // what streams were given; a test issues from one thread
bool capturing = false;

int taken(const char* entry, int change) {
  const int code = needs_init(entry);
  if (code == 0) live += change;
  return code;
}
int give(const char* entry, void** out, void* handle) {
  const int code = taken(entry, 1);
  if (code == 0) *out = handle;
  return code;
}
void log(const char* what, void* stream, unsigned long long number) {
  calls += std::string(what) + " " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + " " +
           std::to_string(number) + "\n";
}
int copy(void* to, const void* from, size_t bytes) { return std::memcpy(to, from, bytes), 0; }
void* at(unsigned long long address) { return reinterpret_cast<void*>(address); }
struct Place {
  size_t x, y;
  int type;
  void* host;
  char* address;
  void* array;
  size_t pitch;
};
struct Copy2D {
  Place from, to;
  size_t width, rows;
};
struct MemOp {
  int operation;
  unsigned* address;
  unsigned value, unused, flags;
  unsigned long long rest[2];
};
}  // namespace

extern "C" {
int cuInit(unsigned) {
  const int code = result("cuInit");
  initialised = code == 0;
  return code;
}
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int code, const char** name) {
  *name = code == 3 ? "CUDA_ERROR_NOT_INITIALIZED" : nullptr;
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 3 ? "initialization error" : nullptr;
  return 0;
}
int cuDeviceGetCount(int* count) { return *count = 2, needs_init("cuDeviceGetCount"); }
// Handles differ from ordinals, so that a mix-up shows.
int cuDeviceGet(int* device, int ordinal) { return *device = 100 + ordinal, needs_init("cuDeviceGet"); }
thread_local void* current_context = reinterpret_cast<void*>(0x70);
int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return needs_init("cuCtxGetCurrent");
}
int cuCtxSetCurrent(void* context) {
  current_context = context;
  return needs_init("cuCtxSetCurrent");
}
// The function handle is the address of a record of 10 words: grid, block, shared memory and attributes, stream and
// the first six parameters.
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const int* attributes;  // id, padding, value
  unsigned count;
};
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void**) {
  void* const stream = config->stream;
  auto* record = static_cast<unsigned long long*>(function);
  record[0] = config->grid[0] * 100 + config->grid[1] * 10 + config->grid[2];
  record[1] = config->block[0] * 100 + config->block[1] * 10 + config->block[2];
  record[2] = config->shared;
  for (unsigned i = 0; i < config->count; ++i) {  // of 72 bytes each
    record[2] += 1'000'000'000ull * config->attributes[18 * i] + 1'000'000 * config->attributes[18 * i + 2];
  }
  record[3] = reinterpret_cast<unsigned long long>(stream);
  for (int i = 0; i < 6; ++i) std::memcpy(&record[4 + i], parameters[i], sizeof *record);
  if (function == wait_kernel) {
    const auto number = [&](int i) { return static_cast<unsigned>(record[4 + i]); };
    const unsigned stride = number(2), mask = number(3), delta = number(4);
    log("wait", stream, mask);
    const auto word = [&](int i, unsigned offset) {
      return __atomic_load_n(reinterpret_cast<unsigned*>(record[4 + i] + offset), __ATOMIC_ACQUIRE);
    };
    const unsigned epoch = record[5] ? word(1, 0) : 0;
    for (unsigned bit = 0; bit < 32; ++bit) {
      while (mask >> bit & 1 && static_cast<int>(word(0, 4 * stride * bit) - (epoch + delta)) < 0 && !word(5, 0)) {
        usleep(1000);
      }
    }
  }
  return needs_init("cuLaunchKernelEx");
}
int cuModuleLoadData(void** module, const void*) { return *module = at(0xa00), needs_init("cuModuleLoadData"); }
int cuModuleGetFunction(void** function, void*, const char*) {
  static unsigned long long record[10];
  return *function = record, needs_init("cuModuleGetFunction");
}
int cuFuncSetAttribute(void*, int, int) { return needs_init("cuFuncSetAttribute"); }
int cuTensorMapEncodeTiled(void*, int, unsigned, void*, const unsigned long long*, const unsigned long long*,
                           const unsigned*, const unsigned*, int, int, int, int) {
  return needs_init("cuTensorMapEncodeTiled");
}
// A kernel with this record waits as te_lite's wait kernel does: flag, word, stride, mask, delta, abort.
void fake_wait_kernel(void* function) { wait_kernel = function; }

int fake_live() { return live; }
const char* fake_calls() { return calls.c_str(); }
void fake_capture(int on) { capturing = on; }

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(device));
  return taken("cuDevicePrimaryCtxRetain", 1);
}
int cuDevicePrimaryCtxRelease_v2(int) { return taken("cuDevicePrimaryCtxRelease", -1); }
int cuThreadExchangeStreamCaptureMode(int*) { return needs_init("cuThreadExchangeStreamCaptureMode"); }

// An allocation is a memfd, so that one that is mapped twice is the same memory.
int cuMemGetAllocationGranularity(size_t* bytes, const int* prop, int) {
  *bytes = 1 << 16;
  return prop[0] == 1 && prop[1] == 1 && prop[2] == 1 ? needs_init("cuMemGetAllocationGranularity") : 1;
}
int cuMemCreate(unsigned long long* allocation, size_t bytes, const int*, unsigned long long) {
  if (const int code = taken("cuMemCreate", 1)) return code;
  const int fd = memfd_create("fake", 0);
  *allocation = static_cast<unsigned long long>(fd);
  return ftruncate(fd, static_cast<off_t>(bytes));
}
int cuMemRelease(unsigned long long allocation) {
  return close(static_cast<int>(allocation)), taken("cuMemRelease", -1);
}
int cuMemExportToShareableHandle(int* fd, unsigned long long allocation, int, unsigned long long) {
  return *fd = dup(static_cast<int>(allocation)), needs_init("cuMemExportToShareableHandle");
}
int cuMemImportFromShareableHandle(unsigned long long* allocation, void* fd, int) {
  if (const int code = taken("cuMemImportFromShareableHandle", 1)) return code;
  *allocation = static_cast<unsigned long long>(dup(static_cast<int>(reinterpret_cast<intptr_t>(fd))));
  return 0;
}
int cuMemAddressReserve(void** address, size_t bytes, size_t, unsigned long long, unsigned long long) {
  if (const int code = taken("cuMemAddressReserve", 1)) return code;
  *address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return 0;
}
int cuMemAddressFree(void* address, size_t bytes) { return munmap(address, bytes), taken("cuMemAddressFree", -1); }
int cuMemMap(void* address, size_t bytes, size_t, unsigned long long allocation, unsigned long long) {
  if (const int code = taken("cuMemMap", 1)) return code;
  return mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(allocation), 0) != address;
}
int cuMemUnmap(void*, size_t) { return taken("cuMemUnmap", -1); }
int cuMemSetAccess(void* address, size_t bytes, const int* access, size_t count) {
  if (const int code = needs_init("cuMemSetAccess")) return code;
  if (count != 1 || access[0] != 1 || access[2] != 3) return 1;
  return mprotect(address, bytes, PROT_READ | PROT_WRITE);
}
int cuMemsetD8Async(void* address, unsigned char value, size_t bytes, void*) {
  return std::memset(address, value, bytes), needs_init("cuMemsetD8Async");
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  return give("cuMemHostAlloc", address, std::malloc(bytes));
}
int cuMemFreeHost(void* address) { return std::free(address), taken("cuMemFreeHost", -1); }

int cuMemsetD8_v2(void* address, unsigned char value, size_t bytes) {
  return std::memset(address, value, bytes), needs_init("cuMemsetD8");
}
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
  log("copy", stream, bytes);
  return copy(to, from, bytes);
}
int cuMemcpy2DAsync_v2(const Copy2D* c, void* stream) {
  log("copy2d", stream, c->rows);
  for (size_t i = 0; i < c->rows; ++i) {
    copy(c->to.address + i * c->to.pitch, c->from.address + i * c->from.pitch, c->width);
  }
  return c->from.type == 4 && c->to.type == 4 && !(c->from.x | c->from.y | c->to.x | c->to.y) ? 0 : 1;
}
// Of words that others may write meanwhile, as a copy engine reads them.
int cuMemcpyDtoHAsync_v2(unsigned* to, const unsigned* from, size_t bytes, void*) {
  for (size_t i = 0; i < bytes / sizeof *to; ++i) to[i] = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  return give("cuStreamCreateWithPriority", stream, at(0x900));
}
int cuStreamDestroy_v2(void*) { return taken("cuStreamDestroy", -1); }
int cuStreamSynchronize(void*) { return needs_init("cuStreamSynchronize"); }
int cuStreamIsCapturing(void*, int* status) { return *status = capturing, needs_init("cuStreamIsCapturing"); }
int cuStreamBatchMemOp_v2(void* stream, unsigned count, MemOp* operations, unsigned) {
  log("batch", stream, count);
  for (const MemOp* op = operations; op < operations + count; ++op) {
    if (op->operation == 2) __atomic_store_n(op->address, op->value, __ATOMIC_RELEASE);
  }
  return needs_init("cuStreamBatchMemOp");
}
int cuEventCreate(void** event, unsigned) { return give("cuEventCreate", event, at(0x800)); }
int cuEventDestroy_v2(void*) { return taken("cuEventDestroy", -1); }
int cuEventRecord(void* event, void* stream) {
  log("record", stream, reinterpret_cast<uintptr_t>(event));
  return needs_init("cuEventRecord");
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  log("await", stream, reinterpret_cast<uintptr_t>(event));
  return needs_init("cuStreamWaitEvent");
}
}
