// A stand-in for libcuda.so.1 with two devices, so that te_lite._C's whole path from dlopen to Python is tested
// on a machine without a GPU. FAKE_CUDA_FAIL=<entry> makes that entry return 3 (not initialised).
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {
bool initialised = false;

int result(const char* entry) {
  const char* fail = std::getenv("FAKE_CUDA_FAIL");
  return fail && !std::strcmp(fail, entry) ? 3 : 0;
}
int needs_init(const char* entry) { return initialised ? result(entry) : 3; }
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
int cuDeviceGetName(char* name, int capacity, int device) {
  std::strncpy(name, device == 100 ? "Fake A" : "Fake B", static_cast<size_t>(capacity));
  return needs_init("cuDeviceGetName");
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<unsigned char>(i * 16 + device - 100);
  return needs_init("cuDeviceGetUuid");
}
// The plain name is the old 32-bit ABI: whoever resolves it gets a wrong size.
int cuDeviceTotalMem(unsigned* bytes, int) { return *bytes = 1, 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{141} << 30, needs_init("cuDeviceTotalMem"); }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
  return needs_init("cuDeviceGetAttribute");
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device == 100 && peer == 101;  // one way only, so that swapped arguments show
  return needs_init("cuDeviceCanAccessPeer");
}
void* current_context = reinterpret_cast<void*>(0x70);
int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return needs_init("cuCtxGetCurrent");
}
int cuCtxSetCurrent(void* context) {
  current_context = context;
  return needs_init("cuCtxSetCurrent");
}
// The function handle is the address of a record of 10 words: grid, block, shared memory, stream and six parameters.
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters, void**) {
  auto* record = static_cast<unsigned long long*>(function);
  record[0] = grid_x * 100 + grid_y * 10 + grid_z;
  record[1] = block_x * 100 + block_y * 10 + block_z;
  record[2] = shared;
  record[3] = reinterpret_cast<unsigned long long>(stream);
  for (int i = 0; i < 6; ++i) std::memcpy(&record[4 + i], parameters[i], sizeof *record);
  return needs_init("cuLaunchKernel");
}
}
