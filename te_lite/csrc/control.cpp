#include "control.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace te_lite {
namespace {

constexpr std::chrono::milliseconds kPeriod{20};
constexpr size_t kWords = sizeof ControlBlock::Entry::text / sizeof(uint64_t);  // of an operation's text

// Cut to what fits, never inside a UTF-8 character: Python decodes what it reads.
void copy_text(void* to, size_t capacity, const std::string& from) {
  size_t length = std::min(from.size(), capacity - 1);
  while (length > 0 && (from[length] & 0xC0) == 0x80) --length;  // where all of it fits, from[length] is 0
  std::memcpy(to, from.data(), length);
  static_cast<char*>(to)[length] = 0;
}

struct Operation {
  int64_t hash;
  std::string text;
};

// Nothing when the entry holds another operation, or is overwritten while it is read.
std::optional<Operation> read(const ControlBlock& block, uint64_t sequence) {
  const ControlBlock::Entry& entry = block.ring[sequence % kRing];
  if (entry.sequence.load(std::memory_order_acquire) != sequence) return std::nullopt;
  uint64_t words[kWords];
  for (size_t i = 0; i < kWords; ++i) words[i] = entry.text[i].load(std::memory_order_relaxed);
  const char* const text = reinterpret_cast<const char*>(words);
  const Operation operation{entry.hash.load(std::memory_order_relaxed), std::string(text, strnlen(text, sizeof words))};
  std::atomic_thread_fence(std::memory_order_acquire);
  if (entry.sequence.load(std::memory_order_relaxed) != sequence) return std::nullopt;
  return operation;
}

bool has_announced(const ControlBlock& block, uint64_t sequence) {
  return block.ring[sequence % kRing].sequence.load(std::memory_order_acquire) >= sequence;
}

ControlBlock& block_of(int rank, int size, const std::vector<uint64_t>& addresses) {
  if (rank < 0 || rank >= size || addresses.size() != static_cast<size_t>(size)) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) + " with " +
                                std::to_string(addresses.size()) +
                                " addresses: a rank lies in [0, size), with one block's address for each rank");
  }
  return *reinterpret_cast<ControlBlock*>(addresses[rank]);
}

}  // namespace

std::string one_decimal(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", seconds);
  return text;
}

Control::Control(int rank, int size, const std::vector<uint64_t>& addresses, double timeout, double silence,
                 std::vector<int> names)
    : rank(rank),
      timeout(timeout),
      names_(std::move(names)),
      silence_(silence),
      process_(getpid()),
      own_(block_of(rank, size, addresses)) {
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) peers_.push_back({peer, block_of(peer, size, addresses)});
  }
  own_.state.store(ControlBlock::kUp, std::memory_order_release);
  watcher_ = std::make_unique<std::thread>(&Control::watch, this);
}

uint64_t Control::announce(const std::string& operation, int64_t hash) {
  check();
  std::lock_guard<std::mutex> lock(writing_);
  const uint64_t sequence = announced_.load(std::memory_order_relaxed) + 1;
  ControlBlock::Entry& entry = own_.ring[sequence % kRing];
  entry.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.hash.store(hash, std::memory_order_relaxed);
  uint64_t words[kWords] = {};
  copy_text(words, sizeof words, operation);
  for (size_t i = 0; i < kWords; ++i) entry.text[i].store(words[i], std::memory_order_relaxed);
  entry.sequence.store(sequence, std::memory_order_release);
  announced_.store(sequence, std::memory_order_release);
  return sequence;
}

void Control::agree(const std::string& operation, int64_t hash) {
  const uint64_t sequence = announce(operation, hash);
  const auto begin = std::chrono::steady_clock::now();
  for (const Peer& peer : peers_) {
    for (;;) {
      if (has_announced(peer.block, sequence)) {
        const std::optional<Operation> theirs = read(peer.block, sequence);
        if (!theirs || theirs->hash == hash) break;  // another operation is for the watcher to name
      }
      check();
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      if (passed.count() > timeout) {
        break_group("rank " + name(rank) + " has waited " + one_decimal(passed.count()) + " s in " +
                    describe(sequence) + " for rank " + name(peer.rank) + ", which has not come to it");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

std::string Control::describe(uint64_t sequence) const {
  const std::optional<Operation> operation = sequence ? read(own_, sequence) : std::nullopt;
  return "operation " + std::to_string(sequence) + (operation ? " (" + operation->text + ")" : "");
}

void Control::break_group(const std::string& message) {
  std::lock_guard<std::mutex> lock(writing_);
  if (is_broken()) return;
  copy_text(own_.message, sizeof own_.message, message);
  own_.broken.store(1, std::memory_order_release);
}

void Control::set_abort_word(uint32_t* word) {
  std::lock_guard<std::mutex> lock(telling_);
  abort_word_ = word;
}

std::optional<std::string> Control::broken() const {
  if (!is_broken()) return std::nullopt;
  return own_.message;
}

void Control::check() const {
  if (!is_broken()) return;
  told_ = true;
  throw GroupBroken(own_.message);
}

void Control::close() {
  if (forked()) {
    (void)watcher_.release();  // leaked: joining a thread that the fork left behind would hang
    return;
  }
  std::lock_guard<std::mutex> lock(closing_);
  if (!watcher_) return;
  stop_ = true;
  watcher_->join();
  watcher_.reset();
  for (Peer& peer : peers_) {
    if (!is_broken()) compare_with(peer);  // what the watcher has not come to
  }
  own_.state.store(ControlBlock::kGone, std::memory_order_release);
}

void Control::watch() {
  auto last = std::chrono::steady_clock::now();
  while (!stop_) {
    std::this_thread::sleep_for(kPeriod);
    own_.heartbeat.fetch_add(1, std::memory_order_relaxed);
    const auto now = std::chrono::steady_clock::now();
    // Capped: after a pause of this process (a debugger, job control) the peers had no chance to show their heartbeat.
    const auto passed = std::min<std::chrono::duration<double>>(now - last, 5 * kPeriod);
    last = now;
    for (Peer& peer : peers_) {
      if (!is_broken()) look_at(peer, passed.count());
    }
    std::lock_guard<std::mutex> lock(telling_);
    if (abort_word_ && is_broken()) __atomic_store_n(abort_word_, 1u, __ATOMIC_RELEASE);
  }
}

void Control::look_at(Peer& peer, double passed) {
  if (peer.block.broken.load(std::memory_order_acquire)) return break_group(peer.block.message);
  compare_with(peer);
  const uint32_t heartbeat = peer.block.heartbeat.load(std::memory_order_relaxed);
  // One that is starting may take its time, one that is gone left in order.
  const uint32_t state = peer.block.state.load(std::memory_order_acquire);
  const uint64_t newest = announced();
  if (state == ControlBlock::kGone && newest && !has_announced(peer.block, newest)) {
    return break_group("rank " + name(peer.rank) + " has left (its program ended, or it called destroy_ub) and " +
                       "will not come to " + describe(newest) + ". See its output");
  }
  const bool up = state == ControlBlock::kUp;
  peer.silent = up && heartbeat == peer.heartbeat ? peer.silent + passed : 0;
  peer.heartbeat = heartbeat;
  if (peer.silent < silence_) return;
  break_group("rank " + name(peer.rank) + " has stopped: no heartbeat for " + one_decimal(peer.silent) +
              " s (its process died or is suspended). See its output; the group's ranks must be started again");
}

void Control::compare_with(Peer& peer) {
  const uint64_t newest = announced();
  if (newest >= kRing) peer.compared = std::max(peer.compared, newest - kRing);
  for (uint64_t sequence = peer.compared + 1; sequence <= newest; peer.compared = sequence++) {
    if (!has_announced(peer.block, sequence)) return;  // not yet
    const std::optional<Operation> mine = read(own_, sequence);
    const std::optional<Operation> theirs = read(peer.block, sequence);
    if (!mine || !theirs || mine->hash == theirs->hash) continue;
    std::string low = "rank " + name(rank) + " runs " + mine->text;
    std::string high = "rank " + name(peer.rank) + " runs " + theirs->text;
    if (rank > peer.rank) std::swap(low, high);  // the same words on both sides
    break_group("the ranks do not run the same program: " + low + ", " + high + " as operation " +
                std::to_string(sequence) +
                ". All ranks must call the same modules in the same order with the same shapes and recipe");
  }
}

}  // namespace te_lite
