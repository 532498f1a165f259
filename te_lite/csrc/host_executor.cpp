// The executor for CPU ranks: threads in place of copy engines, shared memory in place of peer memory.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>

#include "executor.h"

namespace te_lite {
namespace {

using Clock = std::chrono::steady_clock;

// A stream: its steps run one after the other on a thread of its own.
struct Lane {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Step> queue;
  uint64_t queued = 0;
  uint64_t done = 0;
  std::thread thread;

  uint64_t everything() {
    std::lock_guard<std::mutex> lock(mutex);
    return queued;
  }
  void push(Step step) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(step));
    ++queued;
    changed.notify_all();
  }
  void await(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= ticket; });
  }
};

class HostExecutor final : public Executor {
 public:
  HostExecutor(int streams, Control& control) : Executor(control, streams) {
    for (int i = 0; i < streams; ++i) lanes_.push_back(std::make_unique<Lane>());
    for (auto& lane : lanes_) lane->thread = std::thread(&HostExecutor::serve, this, std::ref(*lane));
  }
  ~HostExecutor() override { close(); }

  void synchronize() override {
    for (auto& lane : lanes_) lane->await(lane->everything());
  }

  void close() override {
    if (control_.forked()) {
      for (auto& lane : lanes_) (void)lane.release();  // leaked
      lanes_.clear();
      return;
    }
    closed_ = true;
    for (auto& lane : lanes_) {
      { std::lock_guard<std::mutex> lock(lane->mutex); }  // whoever found closed_ false is waiting by now
      lane->changed.notify_all();
    }
    for (auto& lane : lanes_) {
      if (lane->thread.joinable()) lane->thread.join();
    }
  }

 private:
  void perform(std::vector<Step>& steps, uint64_t, uint64_t) override {
    for (Step& step : steps) {
      if (step.kind == Step::kExpect) continue;
      if (step.kind == Step::kAfter) {
        if (step.other == 0 || step.other == step.stream) continue;  // done already: main is this thread
        step.ticket = lane(step.other).everything();
      }
      if (step.stream > 0) {
        lane(step.stream).push(std::move(step));
        continue;
      }
      if (step.kind == Step::kWait) random_delay();
      run(step);
      if (step.kind == Step::kWait || step.kind == Step::kAfter) control_.check();
    }
  }

  void serve(Lane& lane) {
    std::unique_lock<std::mutex> lock(lane.mutex);
    for (;;) {
      lane.changed.wait(lock, [&] { return !lane.queue.empty() || closed_; });
      if (lane.queue.empty()) return;
      const Step step = std::move(lane.queue.front());
      lane.queue.pop_front();
      lock.unlock();
      if (step.kind == Step::kCopy) random_delay();
      // What follows a wait that was given up must not touch buffers, but counts as done for those that wait for it.
      if (!control_.is_broken() && !closed_) run(step);
      lock.lock();
      ++lane.done;
      lane.changed.notify_all();
    }
  }

  void run(const Step& step) {
    if (step.kind == Step::kCopy) {
      for (size_t row = 0; row < step.rows; ++row) {
        std::memcpy(reinterpret_cast<char*>(step.to) + row * step.to_pitch,
                    reinterpret_cast<const char*>(step.from) + row * step.from_pitch, step.bytes);
      }
    } else if (step.kind == Step::kSet) {
      __atomic_store_n(reinterpret_cast<uint32_t*>(step.to), step.value, __ATOMIC_RELEASE);
    } else if (step.kind == Step::kWait) {
      poll(step);
    } else {
      lane(step.other).await(step.ticket);
    }
  }

  // Until the flag is there, or the group is broken, or nobody waits any more.
  void poll(const Step& step) {
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

  Lane& lane(int stream) { return *lanes_[stream - 1]; }

  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace

std::unique_ptr<Executor> host_executor(int streams, Control& control) {
  return std::make_unique<HostExecutor>(streams, control);
}

}  // namespace te_lite
