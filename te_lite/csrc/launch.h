// Launching compiled kernels with little host time: what a launch needs is decided once, a call only packs arguments.
#pragma once

#include <cstdint>
#include <string>

namespace te_lite {

class Kernel {
 public:
  // function: CUfunction. kinds: one letter an argument of Python's call: p address (None: null), i int32, l int64,
  // f fp32, - not a parameter of the compiled kernel. Two null pointers (Triton's scratch memories) follow the rest.
  // To be built on a thread where the kernel's context is current; a thread that launches gets it when it has none
  // (torch's backward thread starts without) or another.
  Kernel(uint64_t function, int threads, int shared_bytes, std::string kinds);

  const std::string& kinds() const { return kinds_; }

  // Launches (programs, 1, 1) on `stream`; `arguments` are the count parameters in order as the kernel takes
  // them: addresses, integers and floats, in the low bytes. Throws DriverError.
  void launch(unsigned programs, uint64_t stream, uint64_t* arguments, int count) const;
  // The same with the addresses of all parameters, of whatever size they are.
  void launch(unsigned programs, uint64_t stream, void** parameters) const;

 private:
  void* function_;
  void* context_ = nullptr;
  unsigned threads_;
  unsigned shared_bytes_;
  std::string kinds_;
};

constexpr int kMostArguments = 64;

}  // namespace te_lite
