// What an overlapped operation does with its buffers, written down once and issued in one call a segment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace te_lite {

// A wait in words, for the message when it takes too long.
struct Waiting {
  std::string buffer;
  std::string kind;  // "data from" or "room at"
  int rank;
};

constexpr int kMainStream = 0, kCopyStream = 1;  // the caller's; that of the copy engine

// One thing that a Program asks of a stream, or of the watcher. As the Program keeps it, `from` is an offset from an
// argument of issue(), and a flag is `delta` from the epoch. Executor::issue resolves both in a copy.
struct ProgramStep {
  enum Kind { kCopy, kSet, kWait, kExpect, kAfter };
  Kind kind = kCopy;
  int stream = kMainStream;
  uint64_t to = 0;    // a copy's destination; the flag of a set or wait
  int64_t delta = 0;  // of a set or wait, modulo 2^32
  std::shared_ptr<const Waiting> waiting = nullptr;
  int argument = 0;
  uint64_t from = 0;  // a copy's rows, one behind the other
  size_t bytes = 0;   // of a row
  size_t rows = 1;
  size_t pitch = 0;        // from one row of the destination to the next
  uint32_t value = 0;      // of a set or wait, once issued: epoch + delta
  uint64_t operation = 0;  // announced when it was issued
};

class Program {
 public:
  explicit Program(std::string name) : name_(std::move(name)) {}

  void copy(int stream, uint64_t to, int argument, uint64_t from, size_t bytes, size_t rows, size_t pitch) {
    if (argument < 0) {
      throw std::invalid_argument("a copy from argument " + std::to_string(argument) + ": arguments count from 0");
    }
    if (rows < 1 || (rows > 1 && pitch < bytes)) {
      throw std::invalid_argument("a copy of " + std::to_string(rows) + " rows of " + std::to_string(bytes) +
                                  " bytes with a pitch of " + std::to_string(pitch) +
                                  ": there is a row at least, and none is over the pitch");
    }
    arguments_ = std::max(arguments_, argument + 1);
    add({ProgramStep::kCopy, stream, to, 0, nullptr, argument, from, bytes, rows, pitch});
  }
  void set(int stream, uint64_t flag, int64_t delta) { add({ProgramStep::kSet, stream, flag, delta}); }
  // Only the caller's stream waits for flags, see buffers.py.
  void wait(uint64_t flag, int64_t delta, int rank, const std::string& kind) {
    add({ProgramStep::kWait, kMainStream, flag, delta, std::make_shared<Waiting>(Waiting{name_, kind, rank})});
  }
  // The caller's own kernel waits for the flag: only the time that it takes is watched.
  void expect(uint64_t flag, int64_t delta, int rank, const std::string& kind) {
    add({ProgramStep::kExpect, kMainStream, flag, delta, std::make_shared<Waiting>(Waiting{name_, kind, rank})});
  }
  void after(int stream) { add({ProgramStep::kAfter, stream}); }
  void cut() { segments_.emplace_back(); }

  const std::string& name() const { return name_; }
  int arguments() const { return arguments_; }  // that issue() must pass at least
  int segments() const { return static_cast<int>(segments_.size()); }
  const std::vector<ProgramStep>& steps(int segment) const { return segments_[segment]; }

 private:
  void add(const ProgramStep& step) {
    if (step.stream != kMainStream && step.stream != kCopyStream) {
      throw std::invalid_argument("stream " + std::to_string(step.stream) +
                                  ": 0 is the caller's stream, 1 the copy stream");
    }
    segments_.back().push_back(step);
  }

  std::string name_;
  std::vector<std::vector<ProgramStep>> segments_{1};
  int arguments_ = 0;
};

}  // namespace te_lite
