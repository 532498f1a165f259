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

// One step. In a program, `to` and `from` are offsets from the arguments of issue() (-1: addresses already) and value
// is a distance from the epoch; Executor::issue resolves both.
struct Step {
  enum Kind { kCopy, kSet, kWait, kExpect, kAfter };
  Kind kind = kCopy;
  int stream = 0;
  int to_argument = -1;
  uint64_t to = 0;  // a copy's destination; the flag of a set or wait
  int from_argument = -1;
  uint64_t from = 0;
  size_t bytes = 0;  // of a row
  size_t rows = 1;
  size_t to_pitch = 0;  // from one row to the next
  size_t from_pitch = 0;
  int other = 0;  // the stream that kAfter waits for
  uint32_t delta = 0;
  uint32_t value = 0;
  uint64_t operation = 0;  // announced when it was issued
  uint64_t ticket = 0;     // host: how much of `other` must be done
  std::shared_ptr<const Waiting> waiting = nullptr;
};

class Program {
 public:
  explicit Program(std::string name) : name_(std::move(name)) {}

  void copy(int stream, int to_argument, uint64_t to, int from_argument, uint64_t from, size_t bytes, size_t rows,
            size_t to_pitch, size_t from_pitch) {
    if (std::min(to_argument, from_argument) < -1) {
      throw std::invalid_argument("a copy between arguments " + std::to_string(from_argument) + " and " +
                                  std::to_string(to_argument) + ": an argument is an index or -1 for an address");
    }
    if (rows < 1 || (rows > 1 && std::min(to_pitch, from_pitch) < bytes)) {
      throw std::invalid_argument("a copy of " + std::to_string(rows) + " rows of " + std::to_string(bytes) +
                                  " bytes, pitches " + std::to_string(from_pitch) + " and " +
                                  std::to_string(to_pitch) + ": there is a row at least, and none is over a pitch");
    }
    arguments_ = std::max({arguments_, to_argument + 1, from_argument + 1});
    add({Step::kCopy, stream, to_argument, to, from_argument, from, bytes, rows, to_pitch, from_pitch});
  }
  void set(int stream, uint64_t flag, int64_t delta) { add_flag(Step::kSet, stream, flag, delta); }
  void wait(int stream, uint64_t flag, int64_t delta, int rank, const std::string& kind) {
    add_flag(Step::kWait, stream, flag, delta).waiting = std::make_shared<Waiting>(Waiting{name_, kind, rank});
  }
  // The caller's own kernel waits for the flag: only the time that it takes is watched.
  void expect(uint64_t flag, int64_t delta, int rank, const std::string& kind) {
    add_flag(Step::kExpect, 0, flag, delta).waiting = std::make_shared<Waiting>(Waiting{name_, kind, rank});
  }
  void after(int stream, int other) {
    if (other < 0) throw std::invalid_argument("after stream " + std::to_string(other) + ": streams count from 0");
    streams_ = std::max(streams_, other);
    add({Step::kAfter, stream}).other = other;
  }
  void cut() { segments_.emplace_back(); }

  const std::string& name() const { return name_; }
  int streams() const { return streams_; }      // numbered from 1, beside the main one
  int arguments() const { return arguments_; }  // that issue() must pass at least
  int segments() const { return static_cast<int>(segments_.size()); }
  const std::vector<Step>& steps(int segment) const { return segments_[segment]; }

 private:
  Step& add(const Step& step) {
    if (step.stream < 0) {
      throw std::invalid_argument("stream " + std::to_string(step.stream) + ": streams count from 0");
    }
    streams_ = std::max(streams_, step.stream);
    return segments_.back().emplace_back(step);
  }
  Step& add_flag(Step::Kind kind, int stream, uint64_t flag, int64_t delta) {
    Step& step = add({kind, stream, -1, flag});
    step.delta = static_cast<uint32_t>(delta);
    return step;
  }

  std::string name_;
  std::vector<std::vector<Step>> segments_{1};
  int streams_ = 0;
  int arguments_ = 0;
};

}  // namespace te_lite
