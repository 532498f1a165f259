// Issues programs: by threads that play copy engines on the host, by streams on CUDA.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "control.h"
#include "launch.h"
#include "program.h"

namespace te_lite {

// Flags only grow and may pass 2^32: the order is that of the shorter way around.
inline bool reached(uint32_t flag, uint32_t value) { return static_cast<int32_t>(flag - value) >= 0; }

class Executor {
 public:
  virtual ~Executor() = default;

  // Issues one segment. Throws GroupBroken, std::invalid_argument for what does not fit the program.
  void issue(const Program& program, int segment, uint32_t epoch, uint64_t main_stream,
             const std::vector<uint64_t>& arguments, uint64_t epoch_word);
  virtual void synchronize() {}
  virtual void close() = 0;

  // CUDA only; see _C.pyi.
  virtual void set_flags(uint64_t, size_t) {}
  virtual uint64_t abort_address() const { return 0; }
  virtual void set_wait_kernel(const Kernel&) {}

  // For tests.
  void set_delays(uint64_t seed, int max_microseconds);
  void set_ignore_free(bool ignore) { ignore_free_ = ignore; }

 protected:
  Executor(Control& control, int streams) : control_(control), streams_(streams), process_(getpid()) {}
  bool forked() const { return getpid() != process_; }  // a child of the process has no threads that could be joined
  virtual void perform(std::vector<Step>& steps, uint64_t main_stream, uint64_t epoch_word) = 0;
  std::string overdue(const Step& wait, uint32_t seen, double seconds) const;
  void random_delay();

  Control& control_;
  std::atomic<bool> closed_{false};

 private:
  const int streams_;
  const int process_;
  std::atomic<bool> ignore_free_{false};
  std::atomic<uint64_t> random_{0};
  std::atomic<int> most_delay_{0};  // microseconds
};

// streams: how many copy threads.
std::unique_ptr<Executor> host_executor(int streams, Control& control);
// streams: handles of streams 1 and up. Throws DriverUnavailable, DriverError.
std::unique_ptr<Executor> cuda_executor(int device, const std::vector<uint64_t>& streams, Control& control);

}  // namespace te_lite
