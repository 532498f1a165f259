#include "driver.h"

#include <dlfcn.h>

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
#define TE_LITE_RESOLVE(name, version, parameters) resolve(library, #name version, table.name);
  TE_LITE_ENTRIES(TE_LITE_RESOLVE)
#undef TE_LITE_RESOLVE
  return table;
}

}  // namespace

// A local static whose initialiser throws is initialised again by the next call, and threads that come together
// wait for each other: both are what a lazy, retried start needs.
const Driver& opened_driver() {
  static const Driver table = open_library();
  return table;
}

const Driver& driver() {
  static const Driver& initialised = []() -> const Driver& {
    try {
      check(opened_driver().cuInit(0), "cuInit");
    } catch (const DriverError& error) {
      throw DriverUnavailable(error.what());
    }
    return opened_driver();
  }();
  return initialised;
}

PrimaryContext::PrimaryContext(int ordinal) {
  TE_LITE_CHECK(cuDeviceGet, &device_, ordinal);
  TE_LITE_CHECK(cuDevicePrimaryCtxRetain, &context_, device_);
}

}  // namespace te_lite
