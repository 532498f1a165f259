// The executor for CUDA ranks: copy engines, flags that streams write, waits in kernels, and a watcher for waits that
// take too long. A wait is a kernel and no stream memory operation because it must end when the group breaks: by a word
// in host memory that the control thread writes, whatever the driver and the device's queues are held up by. A thread
// that loads a kernel, for one, holds the driver until every stream is idle.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>

#include "driver.h"
#include "executor.h"

namespace te_lite {
namespace {

constexpr std::chrono::milliseconds kPeriod{20};
constexpr int kLook = 10;                  // periods between looks at the device
constexpr std::chrono::seconds kYoung{1};  // waits that are not worth a look yet
constexpr size_t kMostMemOps = 128;        // in one call; the driver takes fewer than 256
constexpr size_t kMostFlags = 32;          // that one wait kernel polls, a thread each, and bits of its mask
constexpr int kHighestPriority = -1000;    // the driver clamps it

class CudaExecutor final : public Executor {
 public:
  CudaExecutor(int device, Control& control, uint64_t copy_stream, uint64_t flags, size_t flag_bytes,
               const Kernel& wait_kernel)
      : Executor(control),
        context_(device),
        streams_{nullptr, reinterpret_cast<void*>(copy_stream)},
        wait_kernel_(wait_kernel),
        flags_(flags),
        flag_bytes_(flag_bytes) {
    if (flags % 4 || flag_bytes % 4 || !flag_bytes) {
      throw std::invalid_argument("flags of " + std::to_string(flag_bytes) + " bytes at " + std::to_string(flags) +
                                  ": both must be multiples of 4, and bytes above 0");
    }
    std::string kinds = wait_kernel.kinds();
    kinds.erase(std::remove(kinds.begin(), kinds.end(), '-'), kinds.end());
    if (kinds != "ppiiip") {
      throw std::invalid_argument("a wait kernel with arguments '" + wait_kernel.kinds() +
                                  "': it takes flag p, word p, stride i, mask i, delta i and abort p");
    }
    try {
      const PrimaryContext::Scope scope(context_);
      TE_LITE_CHECK(cuMemHostAlloc, reinterpret_cast<void**>(&host_), flag_bytes + sizeof *host_, 0);
      *abort_word() = 0;
      control_.set_abort_word(abort_word());
      TE_LITE_CHECK(cuEventCreate, &event_, kEventDisableTiming);
      // For the watcher's look at the flags: apart from the default stream, which waits for others.
      TE_LITE_CHECK(cuStreamCreateWithPriority, &own_stream_, kStreamNonBlocking, kHighestPriority);
      watcher_ = std::make_unique<std::thread>(&CudaExecutor::watch, this);
    } catch (...) {
      close();
      throw;
    }
  }
  ~CudaExecutor() override { close(); }

  uint64_t abort_address() const override { return host_ ? reinterpret_cast<uint64_t>(abort_word()) : 0; }

  void close() override {
    closed_ = true;
    if (control_.forked()) {
      (void)watcher_.release();  // leaked, as is what the driver gave, which does not survive a fork
      return;
    }
    const std::unique_lock<std::shared_mutex> alone(using_);
    stop_ = true;  // not before: the watcher ends a wait that holds a thread in issue(), by the time-out
    if (watcher_) watcher_->join();
    watcher_.reset();
    control_.set_abort_word(nullptr);
    // Unchecked from here on: nobody could act on a failure.
    const PrimaryContext::Scope scope(context_);
    if (own_stream_) {
      driver().cuStreamSynchronize(own_stream_);
      driver().cuStreamDestroy(own_stream_);
    }
    if (host_) driver().cuMemFreeHost(host_);
    if (event_) driver().cuEventDestroy(event_);
    own_stream_ = event_ = host_ = nullptr;
  }

 private:
  struct Pending {
    ProgramStep wait;
    Clock::time_point since;
  };
  using Batch = std::vector<CUstreamMemOp>;  // consecutive sets of one stream
  using Waits = std::vector<ProgramStep>;    // consecutive waits for the same epoch

  uint32_t* abort_word() const { return host_ + flag_bytes_ / sizeof *host_; }
  uint32_t& seen(const Pending& pending) { return host_[(pending.wait.to - flags_) / sizeof *host_]; }

  void perform(std::vector<ProgramStep>& steps, uint64_t main_stream, uint64_t epoch_word) override {
    std::lock_guard<std::mutex> lock(issuing_);
    const PrimaryContext::Scope scope(context_);
    streams_[kMainStream] = reinterpret_cast<void*>(main_stream);
    if (!epoch_word) {
      int capture = kCaptureNone;
      TE_LITE_CHECK(cuStreamIsCapturing, streams_[kMainStream], &capture);
      if (capture != kCaptureNone) {
        throw std::runtime_error("a program is issued to a stream under capture, which would freeze its epoch: pass "
                                 "epoch_word, the address of a device word that holds it");
      }
    }
    Batch batch;
    Waits waits;
    int stream = kMainStream;  // of the batch
    for (const ProgramStep& step : steps) {
      if (step.kind == ProgramStep::kExpect) {
        if (!epoch_word) remember(step);
        continue;
      }
      const bool batched = !epoch_word && step.kind == ProgramStep::kSet, waits_too = step.kind == ProgramStep::kWait;
      if (!batched || step.stream != stream || batch.size() == kMostMemOps) flush(batch, stream);
      const bool joins = waits_too && !waits.empty() && step.delta == waits[0].delta;
      if (!joins) flush(waits, epoch_word);
      stream = step.stream;
      if (batched) {
        batch.push_back({kMemOpWrite32, step.to, step.value, 0, 0, 0});
      } else if (waits_too) {
        waits.push_back(step);
      } else {
        issue_one(step, epoch_word);
      }
    }
    flush(batch, stream);
    flush(waits, epoch_word);
  }

  // A wait is known to the watcher before it can block: also this thread may block, in a full queue.
  void remember(const ProgramStep& wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (wait.to < flags_ || wait.to + 4 > flags_ + flag_bytes_) {
      throw std::invalid_argument("a wait for the flag at " + std::to_string(wait.to) + ", outside of the " +
                                  std::to_string(flag_bytes_) + " bytes at " + std::to_string(flags_) +
                                  " of flags: nobody could release it");
    }
    pending_.push_back({wait, Clock::now()});
  }

  void flush(Batch& batch, int stream) {
    if (batch.empty()) return;
    TE_LITE_CHECK(cuStreamBatchMemOp, streams_[stream], static_cast<unsigned>(batch.size()), batch.data(), 0);
    batch.clear();
  }

  // One launch for flags that lie a multiple of some stride apart, near each other; the others after it.
  void flush(Waits& waits, uint64_t epoch_word) {
    if (waits.empty()) return;
    std::sort(waits.begin(), waits.end(), [](const ProgramStep& a, const ProgramStep& b) { return a.to < b.to; });
    const ProgramStep* const end = waits.data() + waits.size();
    for (const ProgramStep *first = waits.data(), *last = first; first != end; first = last) {
      uint64_t stride = 0;
      for (++last; last != end; ++last) {
        const uint64_t wider = std::gcd(stride, last->to - first->to);
        if (wider && (last->to - first->to) / wider >= kMostFlags) break;
        stride = wider;
      }
      if (!epoch_word) std::for_each(first, last, [this](const ProgramStep& wait) { remember(wait); });
      launch_wait(first, last, stride, epoch_word);
    }
    waits.clear();
  }

  void issue_one(const ProgramStep& step, uint64_t epoch_word) {
    void* const stream = streams_[step.stream];
    if (step.kind == ProgramStep::kCopy && step.rows == 1) {
      TE_LITE_CHECK(cuMemcpyAsync, step.to, step.from, step.bytes, stream);
    } else if (step.kind == ProgramStep::kCopy) {
      const CUmemcpyPlace from{0, 0, kMemoryUnified, nullptr, step.from, nullptr, step.bytes};
      const CUmemcpyPlace to{0, 0, kMemoryUnified, nullptr, step.to, nullptr, step.pitch};
      const CUmemcpy2D rows{from, to, step.bytes, step.rows};
      TE_LITE_CHECK(cuMemcpy2DAsync, &rows, stream);
    } else if (step.kind == ProgramStep::kAfter) {
      const int other = step.stream == kMainStream ? kCopyStream : kMainStream;
      TE_LITE_CHECK(cuEventRecord, event_, streams_[other]);
      TE_LITE_CHECK(cuStreamWaitEvent, stream, event_, 0);
    } else {
      if (step.delta != 0) {
        throw std::invalid_argument("a set of epoch + " + std::to_string(step.delta) +
                                    " with an epoch word: the word is copied as it is, so only + 0 can be set");
      }
      TE_LITE_CHECK(cuMemcpyAsync, step.to, epoch_word, sizeof(uint32_t), stream);
    }
  }

  // stride: bytes of which every flag lies a multiple behind the first.
  void launch_wait(const ProgramStep* first, const ProgramStep* last, uint64_t stride, uint64_t epoch_word) {
    uint32_t mask = 0;
    for (const auto* wait = first; wait != last; ++wait) mask |= 1u << (stride ? (wait->to - first->to) / stride : 0);
    const uint32_t delta = epoch_word ? first->delta : first->value;
    uint64_t arguments[] = {first->to, epoch_word, stride / 4, mask, delta, abort_address()};
    wait_kernel_.launch(1, reinterpret_cast<uint64_t>(streams_[kMainStream]), arguments, 6);
  }

  void watch() try {
    const PrimaryContext::Scope scope(context_);
    int mode = kCaptureModeRelaxed;  // else what this thread does would spoil a capture of another
    TE_LITE_CHECK(cuThreadExchangeStreamCaptureMode, &mode);
    for (int period = 1; !stop_; ++period) {
      std::this_thread::sleep_for(kPeriod);
      if (period % kLook == 0) look();
    }
  } catch (const DriverError& error) {
    if (error.code == kDeinitialized) return;  // the process ends
    control_.break_group("the watcher of rank " + control_.name(control_.rank) + " has failed: " + error.what());
  }

  void look() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const bool old = !pending_.empty() && Clock::now() - pending_.front().since > kYoung;
      if (!old || control_.is_broken()) return;
    }
    // Not under the lock: threads that issue need it, and this may take a while on a busy device.
    TE_LITE_CHECK(cuMemcpyDtoHAsync, host_, flags_, flag_bytes_, own_stream_);
    TE_LITE_CHECK(cuStreamSynchronize, own_stream_);
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(),
                                  [this](const Pending& p) { return reached(seen(p), p.wait.value); }),
                   pending_.end());
    if (pending_.empty()) return;
    const Pending& oldest = pending_.front();
    const std::chrono::duration<double> waited = Clock::now() - oldest.since;
    if (waited.count() > control_.timeout) control_.break_group(overdue(oldest.wait, seen(oldest), waited.count()));
  }

  const PrimaryContext context_;
  std::atomic<bool> stop_{false};  // the watcher
  void* streams_[2];               // the main one is that of the segment that is issued
  void* event_ = nullptr;          // one is enough: a stream that waits for it keeps to what was recorded by then
  const Kernel& wait_kernel_;
  const CUdeviceptr flags_;
  const size_t flag_bytes_;
  std::mutex issuing_;

  std::mutex mutex_;              // of all below
  std::vector<Pending> pending_;  // in the order of issue
  uint32_t* host_ = nullptr;      // pinned: the flags as last seen, then the abort word
  void* own_stream_ = nullptr;
  std::unique_ptr<std::thread> watcher_;
};

}  // namespace

std::unique_ptr<Executor> cuda_executor(int device, Control& control, uint64_t copy_stream, uint64_t flags,
                                        size_t flag_bytes, const Kernel& wait_kernel) {
  return std::make_unique<CudaExecutor>(device, control, copy_stream, flags, flag_bytes, wait_kernel);
}

}  // namespace te_lite
