#include "driver.h"

#include <dlfcn.h>

#include <cstdio>

#include "check.h"

namespace te_lite {
namespace {

template <typename Function>
void resolve(void* library, const char* symbol, Function& entry) {
  entry = reinterpret_cast<Function>(dlsym(library, symbol));
  if (!entry) {
    throw DriverUnavailable(std::string("libcuda.so.1 has no symbol ") + symbol +
                            ": te_lite needs a driver for CUDA 11.7 or newer; update the driver");
  }
}

Driver open_library() {
  // Never closed: the driver keeps threads and handlers of its own.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* error = dlerror();
    throw DriverUnavailable(std::string("libcuda.so.1 cannot be opened (") + (error ? error : "no reason given") +
                            "): install NVIDIA's driver to use GPUs, or run on the CPU");
  }
  Driver table{};
#define TE_LITE_RESOLVE(name, symbol, parameters) resolve(library, symbol, table.name);
  TE_LITE_ENTRIES(TE_LITE_RESOLVE)
#undef TE_LITE_RESOLVE
  return table;
}

// A local static whose initialiser throws is initialised again by the next call, and threads that come together
// wait for each other: both are what a lazy, retried start needs.
const Driver& opened() {
  static const Driver table = open_library();
  return table;
}

std::string uuid_text(const CUuuid& uuid) {
  std::string text;
  for (int i = 0; i < 16; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", uuid.bytes[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

DeviceInfo device_info(const Driver& cuda, int ordinal) {
  DeviceInfo info{};
  CUdevice device = 0;
  char name[256] = {};
  CUuuid uuid{};
  TE_LITE_CHECK(cuda, cuDeviceGet, &device, ordinal);
  TE_LITE_CHECK(cuda, cuDeviceGetName, name, static_cast<int>(sizeof name), device);
  TE_LITE_CHECK(cuda, cuDeviceGetUuid, &uuid, device);
  TE_LITE_CHECK(cuda, cuDeviceTotalMem, &info.total_memory, device);
  TE_LITE_CHECK(cuda, cuDeviceGetAttribute, &info.multiprocessors, kAttributeMultiprocessorCount, device);
  TE_LITE_CHECK(cuda, cuDeviceGetAttribute, &info.compute_major, kAttributeComputeCapabilityMajor, device);
  TE_LITE_CHECK(cuda, cuDeviceGetAttribute, &info.compute_minor, kAttributeComputeCapabilityMinor, device);
  info.name = name;
  info.ordinal = ordinal;
  info.uuid = uuid_text(uuid);
  return info;
}

int device_count(const Driver& cuda) {
  int count = 0;
  TE_LITE_CHECK(cuda, cuDeviceGetCount, &count);
  return count;
}

}  // namespace

const Driver& driver() {
  static const bool initialised = [] {
    const Driver& cuda = opened();
    try {
      TE_LITE_CHECK(cuda, cuInit, 0);
    } catch (const DriverError& error) {
      throw DriverUnavailable(error.what());
    }
    return true;
  }();
  (void)initialised;
  return opened();
}

DriverInfo driver_info() {
  DriverInfo info;
  try {
    // Works without cuInit, so the version is known also where every device is hidden.
    TE_LITE_CHECK(opened(), cuDriverGetVersion, &info.driver_version);
    driver();
  } catch (const DriverUnavailable& unavailable) {
    info.reason = unavailable.what();
    return info;
  }
  const Driver& cuda = driver();
  const int count = device_count(cuda);
  for (int ordinal = 0; ordinal < count; ++ordinal) info.devices.push_back(device_info(cuda, ordinal));
  info.available = count > 0;
  if (!info.available) info.reason = "the driver shows no device: check CUDA_VISIBLE_DEVICES";
  return info;
}

bool can_access_peer(int a, int b) {
  const Driver& cuda = driver();
  const int count = device_count(cuda);
  for (int ordinal : {a, b}) {
    if (ordinal < 0 || ordinal >= count) {
      throw std::invalid_argument("device ordinal " + std::to_string(ordinal) +
                                  " does not exist: the driver shows " + std::to_string(count) +
                                  " device(s), numbered from 0 after CUDA_VISIBLE_DEVICES; pass one of those");
    }
  }
  if (a == b) return true;  // the driver says no for a device and itself
  CUdevice from = 0;
  CUdevice to = 0;
  int can_access = 0;
  TE_LITE_CHECK(cuda, cuDeviceGet, &from, a);
  TE_LITE_CHECK(cuda, cuDeviceGet, &to, b);
  TE_LITE_CHECK(cuda, cuDeviceCanAccessPeer, &can_access, from, to);
  return can_access != 0;
}

PrimaryContext::PrimaryContext(int ordinal) {
  const Driver& cuda = driver();
  TE_LITE_CHECK(cuda, cuDeviceGet, &device_, ordinal);
  TE_LITE_CHECK(cuda, cuDevicePrimaryCtxRetain, &context_, device_);
}

PrimaryContext::~PrimaryContext() { driver().cuDevicePrimaryCtxRelease(device_); }

PrimaryContext::Scope::Scope(void* context) : context_(context) {
  driver().cuCtxGetCurrent(&before_);
  if (before_ != context_) driver().cuCtxSetCurrent(context_);
}

PrimaryContext::Scope::~Scope() {
  if (before_ != context_) driver().cuCtxSetCurrent(before_);
}

}  // namespace te_lite
