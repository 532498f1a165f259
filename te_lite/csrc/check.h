// A failed driver call as a C++ exception that names the call, the error and what the driver says about it.
#pragma once

#include <stdexcept>
#include <string>

#include "driver.h"

namespace te_lite {

struct DriverError : std::runtime_error {
  DriverError(const std::string& call, CUresult code, const std::string& name, const std::string& text)
      : std::runtime_error(call + " failed: " + name + " (" + std::to_string(code) + "): " + text),
        code(code) {}

  const CUresult code;
};

inline void check(CUresult result, const char* call) {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  // Both leave a null pointer for a code that this driver does not know.
  opened_driver().cuGetErrorName(result, &name);
  opened_driver().cuGetErrorString(result, &text);
  throw DriverError(call, result, name ? name : "unknown error", text ? text : "no description");
}

}  // namespace te_lite

// TE_LITE_CHECK(cuDeviceGet, &device, 0) calls driver().cuDeviceGet and names it in the error.
#define TE_LITE_CHECK(entry, ...) ::te_lite::check(::te_lite::driver().entry(__VA_ARGS__), #entry)
