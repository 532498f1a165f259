#include "launch.h"

#include <stdexcept>
#include <utility>

#include "check.h"
#include "driver.h"

namespace te_lite {

Kernel::Kernel(uint64_t function, int threads, int shared_bytes, std::string kinds)
    : function_(reinterpret_cast<void*>(function)),
      threads_(static_cast<unsigned>(threads)),
      shared_bytes_(static_cast<unsigned>(shared_bytes)),
      kinds_(std::move(kinds)) {
  if (kinds_.size() > kMostArguments - 2) {
    throw std::invalid_argument("a kernel with " + std::to_string(kinds_.size()) + " arguments: at most " +
                                std::to_string(kMostArguments - 2) + " are supported");
  }
  if (kinds_.find_first_not_of("pilf-") != std::string::npos) {
    throw std::invalid_argument("kinds '" + kinds_ + "': each must be one of p, i, l, f and -");
  }
  const Driver& cuda = driver();
  TE_LITE_CHECK(cuda, cuCtxGetCurrent, &context_);
}

void Kernel::launch(unsigned programs, uint64_t stream, uint64_t* arguments, int count) const {
  void* parameters[kMostArguments];
  for (int i = 0; i < count; ++i) parameters[i] = &arguments[i];
  uint64_t null = 0;
  parameters[count] = parameters[count + 1] = &null;
  launch(programs, stream, parameters);
}

void Kernel::launch(unsigned programs, uint64_t stream, void** parameters) const {
  const Driver& cuda = driver();
  void* current = nullptr;
  TE_LITE_CHECK(cuda, cuCtxGetCurrent, &current);
  if (current != context_) TE_LITE_CHECK(cuda, cuCtxSetCurrent, context_);
  TE_LITE_CHECK(cuda, cuLaunchKernel, function_, programs, 1, 1, threads_, 1, 1, shared_bytes_,
                reinterpret_cast<void*>(stream), parameters, nullptr);
}

}  // namespace te_lite
