// Launching compiled kernels with little host time: what a launch needs is decided once, a call only packs arguments.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "driver.h"

namespace te_lite {

constexpr int kMostArguments = 64;

class Kernel {
 public:
  // function: CUfunction. kinds: one letter an argument of Python's call: p address (None: null), i int32, l int64,
  // f fp32, - not a parameter of the compiled kernel. Two null pointers (Triton's scratch memories) follow the rest.
  // To be built on a thread where the kernel's context is current; a thread that launches gets it when it has none
  // (torch's backward thread starts without) or another.
  // early: launched before the kernel before it on the stream has ended, for which it waits itself.
  Kernel(uint64_t function, unsigned threads, unsigned shared_bytes, std::string kinds, bool early)
      : function_(reinterpret_cast<void*>(function)),
        threads_(threads),
        shared_bytes_(shared_bytes),
        kinds_(std::move(kinds)),
        early_(early) {
    if (kinds_.size() > kMostArguments - 2) {
      throw std::invalid_argument("a kernel with " + std::to_string(kinds_.size()) + " arguments: at most " +
                                  std::to_string(kMostArguments - 2) + " are supported");
    }
    if (kinds_.find_first_not_of("pilf-") != std::string::npos) {
      throw std::invalid_argument("kinds '" + kinds_ + "': each must be one of p, i, l, f and -");
    }
    TE_LITE_CHECK(cuCtxGetCurrent, &context_);
  }

  const std::string& kinds() const { return kinds_; }

  // Makes the kernel's context that of this thread.
  void enter() const {
    void* current = nullptr;
    TE_LITE_CHECK(cuCtxGetCurrent, &current);
    if (current != context_) TE_LITE_CHECK(cuCtxSetCurrent, context_);
  }

  // Launches (programs, 1, 1) on `stream`; `arguments` are the count parameters in order as the kernel takes
  // them: addresses, integers and floats, in the low bytes. Throws DriverError.
  void launch(unsigned programs, uint64_t stream, uint64_t* arguments, int count) const {
    void* parameters[kMostArguments];
    for (int i = 0; i < count; ++i) parameters[i] = &arguments[i];
    uint64_t null = 0;
    parameters[count] = parameters[count + 1] = &null;
    launch(programs, stream, parameters);
  }

  // The same with the addresses of all parameters, of whatever size they are.
  void launch(unsigned programs, uint64_t stream, void** parameters) const {
    enter();
    CUlaunchAttribute early{kLaunchEarly, 0, 1, {}};
    void* const on = reinterpret_cast<void*>(stream);
    const CUlaunchConfig config{programs, 1, 1, threads_, 1, 1, shared_bytes_, on, &early, early_};
    TE_LITE_CHECK(cuLaunchKernelEx, &config, function_, parameters, nullptr);
  }

 private:
  void* const function_;
  void* context_ = nullptr;
  const unsigned threads_;
  const unsigned shared_bytes_;
  const std::string kinds_;
  const bool early_;
};

}  // namespace te_lite
