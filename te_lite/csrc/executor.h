// Issues programs: by a thread that plays the copy engine on the host, by streams on CUDA.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "control.h"
#include "launch.h"
#include "program.h"

namespace te_lite {

using Clock = std::chrono::steady_clock;

// Flags only grow and may pass 2^32: the order is that of the shorter way around.
inline bool reached(uint32_t flag, uint32_t value) { return static_cast<int32_t>(flag - value) >= 0; }

class Executor {
 public:
  virtual ~Executor() = default;

  // Issues one segment. Throws GroupBroken, std::invalid_argument for what does not fit the program.
  void issue(const Program& program, int segment, uint32_t epoch, uint64_t main_stream,
             const std::vector<uint64_t>& arguments, uint64_t epoch_word) {
    control_.check();
    const std::shared_lock<std::shared_mutex> use(using_);
    if (closed_) throw std::runtime_error("program " + program.name() + " is issued to an executor that is closed");
    if (segment < 0 || segment >= program.segments() || static_cast<size_t>(program.arguments()) > arguments.size()) {
      throw std::invalid_argument("program " + program.name() + " has segments 0 to " +
                                  std::to_string(program.segments() - 1) + " and takes " +
                                  std::to_string(program.arguments()) + " arguments: segment " +
                                  std::to_string(segment) + " was issued with " + std::to_string(arguments.size()) +
                                  " arguments");
    }
    std::vector<ProgramStep> steps;
    const uint64_t operation = control_.announced();
    for (ProgramStep step : program.steps(segment)) {
      if (ignore_free_ && step.waiting && step.waiting->kind == "room at") continue;
      if (step.kind == ProgramStep::kCopy) step.from += arguments[step.argument];
      step.value = epoch + step.delta;
      step.operation = operation;
      steps.push_back(std::move(step));
    }
    perform(steps, main_stream, epoch_word);
  }

  virtual void synchronize() {}
  virtual void close() = 0;

  virtual uint64_t abort_address() const { return 0; }  // CUDA only; see _C.pyi

  // For tests.
  void set_delays(uint64_t seed, int max_microseconds) {
    random_ = seed;
    most_delay_ = max_microseconds;
  }
  void set_ignore_free(bool ignore) { ignore_free_ = ignore; }

 protected:
  explicit Executor(Control& control) : control_(control) {}
  virtual void perform(std::vector<ProgramStep>& steps, uint64_t main_stream, uint64_t epoch_word) = 0;

  std::string overdue(const ProgramStep& wait, uint32_t seen, double seconds) const {
    const std::string other = control_.name(wait.waiting->rank);
    return control_.describe(wait.operation) + ", buffer " + wait.waiting->buffer + ": rank " +
           control_.name(control_.rank) + " has waited " + one_decimal(seconds) + " s for " + wait.waiting->kind +
           " rank " + other + ": epoch " + std::to_string(wait.value) + " is expected, " + std::to_string(seen) +
           " is seen. See what rank " + other + " does; raise the time-out if it is only slow";
  }

  void random_delay() {
    const int most = most_delay_.load(std::memory_order_relaxed);
    if (most <= 0) return;
    // splitmix64: a counter that every thread may advance, mixed.
    uint64_t bits = random_.fetch_add(0x9E3779B97F4A7C15u);
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    std::this_thread::sleep_for(std::chrono::microseconds((bits ^ (bits >> 31)) % (most + 1)));
  }

  Control& control_;
  std::atomic<bool> closed_{false};
  // issue() shares it and reads closed_ under it; close() sets closed_ and then takes it alone. So nobody is in issue()
  // any more when close() frees what that uses, and its caller the memory. Whoever is in issue() leaves: its waits end by
  // closed_ (host) or by the time-out (CUDA). Of threads that close at once one does, the others find it done.
  std::shared_mutex using_;

 private:
  std::atomic<bool> ignore_free_{false};
  std::atomic<uint64_t> random_{0};
  std::atomic<int> most_delay_{0};  // microseconds
};

std::unique_ptr<Executor> host_executor(Control& control);
// copy_stream: its handle. flags: those this rank waits for. Throws DriverUnavailable, DriverError.
std::unique_ptr<Executor> cuda_executor(int device, Control& control, uint64_t copy_stream, uint64_t flags,
                                        size_t flag_bytes, const Kernel& wait_kernel);

}  // namespace te_lite
