// What the ranks of a group tell each other beside the work: that they live, what they run, and why they stopped.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace te_lite {

// The group cannot go on, on any rank. what() is the first reason that any rank gave.
struct GroupBroken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string one_decimal(double seconds);  // "2.5"

constexpr int kRing = 64;  // operations a rank may be ahead of another and still be compared with it

// One rank's block of shared host memory, written by that rank alone. Starts as zeros.
struct alignas(64) ControlBlock {
  enum State : uint32_t { kStarting, kUp, kGone };
  struct Entry {
    std::atomic<uint64_t> sequence;  // 0 while the entry is being written
    std::atomic<int64_t> hash;
    std::atomic<uint64_t> text[30];  // words, since a reader may come in the middle of a write (and then drops it)
  };
  std::atomic<uint32_t> heartbeat;
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> broken;  // once set, message is there and stays
  char message[1024];
  Entry ring[kRing];  // operation n is entry n % kRing
};

class Control {
 public:
  // addresses[r]: rank r's block; the memory outlives this. timeout, silence: seconds that a wait may take and that
  // a peer may show no heartbeat. names: what messages call the ranks; none: by their index.
  Control(int rank, int size, const std::vector<uint64_t>& addresses, double timeout, double silence,
          std::vector<int> names);

  // What messages call a rank.
  std::string name(int rank) const { return std::to_string(names_.empty() ? rank : names_.at(rank)); }
  ~Control() { close(); }

  // Tells the peers that the next operation begins; its number. Throws GroupBroken.
  uint64_t announce(const std::string& operation, int64_t hash);
  // As announce, and returns once all ranks have announced the same: for what cannot be stopped once it has begun.
  // Throws GroupBroken, at the latest after the time-out, and on every rank.
  void agree(const std::string& operation, int64_t hash);
  uint64_t announced() const { return announced_.load(std::memory_order_acquire); }
  std::string describe(uint64_t sequence) const;  // "operation 17 (its text)"

  void break_group(const std::string& message);  // the first reason stays
  bool is_broken() const { return own_.broken.load(std::memory_order_acquire) != 0; }
  std::optional<std::string> broken() const;
  void check() const;                  // throws GroupBroken
  bool told() const { return told_; }  // whether check() has thrown
  // A word that becomes 1 when the group breaks, for those that look at nothing else; null: no more.
  void set_abort_word(uint32_t* word);
  void close();
  bool forked() const { return getpid() != process_; }  // a child of the process has no threads that could be joined

  const int rank;
  const double timeout;

 private:
  struct Peer {  // another rank
    int rank;
    const ControlBlock& block;
    uint64_t compared = 0;  // operations up to this one agree or can no longer be compared
    uint32_t heartbeat = 0;
    double silent = 0;  // seconds
  };
  void watch();
  void look_at(Peer& peer, double passed);
  void compare_with(Peer& peer);

  const std::vector<int> names_;
  const double silence_;
  const int process_;
  std::vector<Peer> peers_;
  ControlBlock& own_;
  std::mutex writing_;  // own_
  std::mutex telling_;  // abort_word_
  std::mutex closing_;  // watcher_
  uint32_t* abort_word_ = nullptr;
  std::atomic<uint64_t> announced_{0};
  std::atomic<bool> stop_{false};
  mutable std::atomic<bool> told_{false};
  std::unique_ptr<std::thread> watcher_;
};

}  // namespace te_lite
