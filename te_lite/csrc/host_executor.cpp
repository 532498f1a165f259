// The executor for CPU ranks: a thread in place of a copy engine, shared memory in place of peer memory.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>

#include "executor.h"

namespace te_lite {
namespace {

// The copy stream: its steps run one after the other on a thread of its own.
struct Lane {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<ProgramStep> queue;
  uint64_t queued = 0;
  uint64_t done = 0;
  bool stop = false;
  std::thread thread;
};

class HostExecutor final : public Executor {
 public:
  explicit HostExecutor(Control& control) : Executor(control), lane_(std::make_unique<Lane>()) {
    lane_->thread = std::thread(&HostExecutor::serve, this, std::ref(*lane_));
  }
  ~HostExecutor() override { close(); }

  void synchronize() override {
    if (!lane_) return;  // closed in a forked child
    std::unique_lock<std::mutex> lock(lane_->mutex);
    lane_->changed.wait(lock, [this, everything = lane_->queued] { return lane_->done >= everything; });
  }

  void close() override {
    closed_ = true;
    if (control_.forked()) {
      (void)lane_.release();  // leaked
      return;
    }
    const std::unique_lock<std::shared_mutex> alone(using_);
    // Not before: who was in issue() may have waited for what it had queued.
    std::unique_lock<std::mutex> lock(lane_->mutex);
    lane_->stop = true;
    lock.unlock();
    lane_->changed.notify_all();
    if (lane_->thread.joinable()) lane_->thread.join();
  }

 private:
  void perform(std::vector<ProgramStep>& steps, uint64_t, uint64_t) override {
    for (ProgramStep& step : steps) {
      if (step.kind == ProgramStep::kExpect) continue;  // no kernel waits here
      if (step.kind == ProgramStep::kWait) {
        random_delay();
        poll(step);
        control_.check();
      } else if (step.kind == ProgramStep::kAfter) {
        if (step.stream == kCopyStream) continue;  // done already: main is this thread
        synchronize();
        control_.check();
      } else if (step.stream == kCopyStream) {
        std::lock_guard<std::mutex> lock(lane_->mutex);
        lane_->queue.push_back(std::move(step));
        ++lane_->queued;
        lane_->changed.notify_all();
      } else {
        run(step);
      }
    }
  }

  void serve(Lane& lane) {
    std::unique_lock<std::mutex> lock(lane.mutex);
    for (;;) {
      lane.changed.wait(lock, [&] { return !lane.queue.empty() || lane.stop; });
      if (lane.queue.empty()) return;
      const ProgramStep step = std::move(lane.queue.front());
      lane.queue.pop_front();
      lock.unlock();
      if (step.kind == ProgramStep::kCopy) random_delay();
      // What is left when the group breaks is dropped, but counts as done for those that wait for it.
      if (!control_.is_broken() && !closed_) run(step);
      lock.lock();
      ++lane.done;
      lane.changed.notify_all();
    }
  }

  void run(const ProgramStep& step) {
    if (step.kind == ProgramStep::kSet) {
      __atomic_store_n(reinterpret_cast<uint32_t*>(step.to), step.value, __ATOMIC_RELEASE);
      return;
    }
    for (size_t row = 0; row < step.rows; ++row) {
      std::memcpy(reinterpret_cast<char*>(step.to) + row * step.pitch,
                  reinterpret_cast<const char*>(step.from) + row * step.bytes, step.bytes);
    }
  }

  // Until the flag is there, or the group is broken, or nobody waits any more.
  void poll(const ProgramStep& step) {
    const Clock::time_point begin = Clock::now();
    std::chrono::microseconds pause{20};
    for (int round = 0;; ++round) {
      const uint32_t seen = __atomic_load_n(reinterpret_cast<uint32_t*>(step.to), __ATOMIC_ACQUIRE);
      if (reached(seen, step.value) || control_.is_broken() || closed_) return;
      if (round < 200) continue;  // some microseconds: the usual case where ranks are in step and have cores
      const std::chrono::duration<double> waited = Clock::now() - begin;
      if (waited.count() > control_.timeout) return control_.break_group(overdue(step, seen, waited.count()));
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds{200});
    }
  }

  std::unique_ptr<Lane> lane_;
};

}  // namespace

std::unique_ptr<Executor> host_executor(Control& control) { return std::make_unique<HostExecutor>(control); }

}  // namespace te_lite
