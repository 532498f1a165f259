// Drives the concurrent parts of csrc without Python, for g++'s sanitizers: ranks as threads of one process, which the
// thread sanitizer sees, and as forked processes, which share memory as real ranks do. See test_sanitized.py.
//
//     sanitized [scenario ...]        all of them by default; exit status 0, or a line that says what went wrong
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

#include "executor.h"

using namespace te_lite;

extern "C" void fake_wait_kernel(void* function);  // of fake_libcuda.cpp
extern "C" int fake_live();

namespace {

#define CHECK(condition) \
  do { \
    if (condition) break; \
    std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
    std::_Exit(3); \
  } while (false)

constexpr size_t kPiece = 1000, kPart = 1 << 16;  // bytes: of a copy; of a rank's flags and arena
constexpr int kSlots = 2;
constexpr uint32_t kFirst = 0xFFFFFFFDu;  // the first epochs pass 2^32

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// A group's shared memory: control blocks, then flags and arena of each rank.
struct Memory {
  explicit Memory(int size) : size(size), control((size * sizeof(ControlBlock) + 63) / 64 * 64) {
    bytes = control + size * kPart;
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    base = reinterpret_cast<uint64_t>(at);
    for (int rank = 0; rank < size; ++rank) {
      for (int peer = 0; peer < size; ++peer) *word(ready(rank, peer)) = *word(free(rank, peer)) = kFirst - 1;
    }
  }
  ~Memory() { munmap(reinterpret_cast<void*>(base), bytes); }

  std::vector<uint64_t> blocks() const {
    std::vector<uint64_t> out;
    for (int rank = 0; rank < size; ++rank) out.push_back(base + rank * sizeof(ControlBlock));
    return out;
  }
  ControlBlock& block(int rank) const { return *reinterpret_cast<ControlBlock*>(blocks()[rank]); }
  uint64_t ready(int rank, int peer) const { return base + control + rank * kPart + 8 * peer; }
  uint64_t free(int rank, int peer) const { return ready(rank, peer) + 4; }
  uint64_t piece(int rank, int slot, int source) const {
    return base + control + rank * kPart + 4096 + (slot * size + source) * kPiece;
  }
  static uint32_t* word(uint64_t address) { return reinterpret_cast<uint32_t*>(address); }

  const int size;
  const size_t control;
  size_t bytes;
  uint64_t base;
};

struct Rank {
  Rank(const Memory& memory, int rank, double timeout = 30, double silence = 10)
      : control(rank, memory.size, memory.blocks(), timeout, silence, {}), executor(host_executor(control)) {}

  void issue(const Program& program, int segment = 0, uint32_t epoch = 0, std::vector<uint64_t> arguments = {0}) {
    executor->issue(program, segment, epoch, 0, arguments, 0);
  }
  // What issue() throws.
  std::string broken(const Program& program) {
    try {
      issue(program);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  }

  Control control;
  std::unique_ptr<Executor> executor;
};

void together(int count, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(run, i);
  for (std::thread& thread : threads) thread.join();
}

bool has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str());
  return false;
}

// All-gather of a piece; segments: push, wait, free.
Program gather(const Memory& memory, int rank, int slot) {
  Program out("gather");
  for (int peer = 0; peer < memory.size; ++peer) {
    if (peer == rank) continue;
    out.wait(memory.free(rank, peer), -kSlots, peer, "room at");
    out.after(kCopyStream);
    out.copy(kCopyStream, memory.piece(peer, slot, rank), 0, 0, kPiece, 1, 0);
    out.set(kCopyStream, memory.ready(peer, rank), 0);
  }
  out.cut();
  for (int peer = 0; peer < memory.size; ++peer) {
    if (peer != rank) out.wait(memory.ready(rank, peer), 0, peer, "data from");
  }
  out.cut();
  for (int peer = 0; peer < memory.size; ++peer) {
    if (peer != rank) out.set(kMainStream, memory.free(peer, rank), 0);
  }
  out.after(kMainStream);
  return out;
}

// Epochs of the gather, while another thread asks what a process asks beside its work.
void exchange(const Memory& memory, int rank, int epochs) {
  Rank self(memory, rank);
  std::vector<Program> programs;
  for (int slot = 0; slot < kSlots; ++slot) programs.push_back(gather(memory, rank, slot));
  std::atomic<bool> done{false};
  std::thread beside([&] {
    for (int round = 0; !done; ++round) {
      self.executor->set_delays(round, 200);
      self.executor->synchronize();
      (void)self.control.describe(self.control.announced());
      CHECK(!self.control.broken());
      pause(1);
    }
  });
  std::vector<unsigned char> mine(kPiece);
  for (int n = 0; n < epochs; ++n) {
    const int slot = n % kSlots;
    const std::vector<uint64_t> argument{reinterpret_cast<uint64_t>(mine.data())};
    std::memset(mine.data(), 31 * rank + n, kPiece);
    if (n % 4) {
      self.control.announce("gather", n);
    } else {
      self.control.agree("gather", n);
    }
    for (int segment = 0; segment < 2; ++segment) self.issue(programs[slot], segment, kFirst + n, argument);
    for (int peer = 0; peer < memory.size; ++peer) {
      const auto* const piece = reinterpret_cast<unsigned char*>(memory.piece(rank, slot, peer));
      for (size_t i = 0; i < kPiece && peer != rank; ++i) {
        CHECK(piece[i] == static_cast<unsigned char>(31 * peer + n));
      }
    }
    self.issue(programs[slot], 2, kFirst + n, argument);
  }
  done = true;
  beside.join();
  self.executor->synchronize();
  self.control.check();
}

void threads() {
  const Memory memory(3);
  together(3, [&](int rank) { exchange(memory, rank, 300); });
}

// To be run before this process has threads of its own: a fork takes along only the one that calls it.
void processes() {
  const Memory memory(3);
  for (int rank = 0; rank < 3; ++rank) {
    if (fork() == 0) {
      exchange(memory, rank, 60);
      std::exit(0);
    }
  }
  for (int status = 0; wait(&status) > 0;) CHECK(status == 0);
}

Program waiting(const Memory& memory, int rank, int peer) {
  Program out("buffer");
  out.wait(memory.ready(rank, peer), 0, peer, "data from");
  return out;
}

void killed() {
  const Memory memory(2);
  const pid_t victim = fork();
  if (victim == 0) {
    Rank self(memory, 1);
    pause(60000);
  }
  const pid_t other = fork();
  if (other == 0) {
    Rank self(memory, 0, 30, 0.5);
    CHECK(has(self.broken(waiting(memory, 0, 1)), "rank 1 has stopped: no heartbeat"));
    std::exit(0);
  }
  pause(700);
  kill(victim, SIGKILL);
  int status = 0;
  CHECK(waitpid(other, &status, 0) == other && status == 0);
  CHECK(waitpid(victim, &status, 0) == victim);
}

// The child of a process with ranks drops them.
void forked() {
  const Memory memory(2);
  Rank self(memory, 0);
  const pid_t child = fork();
  if (child == 0) {
    self.executor->close();
    self.control.close();
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  self.control.check();
}

void mismatch() {
  const Memory memory(3);
  together(3, [&](int rank) {
    Rank self(memory, rank);
    std::string said;
    try {
      for (int n = 0; n < 200; ++n) self.control.announce("Y", n);  // more than the ring holds
      self.control.agree(rank == 1 ? "X" : "Y", rank == 1);
    } catch (const GroupBroken& broken) {
      said = broken.what();
    }
    CHECK(has(said, "rank 1 runs X"));
  });
}

// Of several that break the group at once one reason stays on each rank; a wait that takes too long is one.
void breaking() {
  const Memory memory(2);
  Rank waits(memory, 0, 0.3), other(memory, 1);
  CHECK(has(waits.broken(waiting(memory, 0, 1)), "has waited 0.3 s for data from rank 1"));
  together(4, [&](int i) { other.control.break_group("reason " + std::to_string(i)); });
  CHECK(other.control.broken() && other.broken(waiting(memory, 1, 0)) == *other.control.broken());
}

// Two threads close what a third still waits in and a fourth issues to; a closed executor refuses.
void closing() {
  for (int round = 0; round < 30; ++round) {
    const Memory memory(2);
    Rank self(memory, 0), peer(memory, 1);
    Program copies("copies");
    for (int i = 0; i < 200; ++i) copies.copy(kCopyStream, memory.piece(1, 0, 0), 0, 0, kPiece, 1, 0);
    copies.after(kMainStream);
    std::vector<char> data(kPiece);
    std::atomic<int> started{0};
    together(4, [&](int i) {
      ++started;
      if (i == 0) {
        const std::string said = self.broken(waiting(memory, 0, 1));
        CHECK(said.empty() || has(said, "closed"));
      } else if (i == 1) {
        std::string said;
        while (said.empty()) {
          try {
            self.issue(copies, 0, 0, {reinterpret_cast<uint64_t>(data.data())});
          } catch (const std::runtime_error& error) {
            said = error.what();
          }
        }
        CHECK(has(said, "closed"));
      } else {
        while (started < 4) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
        self.executor->close();
        self.executor->synchronize();
        self.control.close();
      }
    });
    CHECK(!self.control.is_broken());
  }
}

// The CUDA executor over fake_libcuda.cpp, whose streams hold the thread that issues.
void cuda() {
  const Memory memory(2);
  Control control(0, 2, memory.blocks(), 2.0, 10, {}), peer(1, 2, memory.blocks(), 30, 10, {});
  unsigned long long record[10];
  fake_wait_kernel(record);
  const int before = fake_live();
  const Kernel kernel(reinterpret_cast<uint64_t>(record), 32, 0, "ppiiip-", false);
  const uint64_t flags = memory.ready(0, 0);
  std::unique_ptr<Executor> executor = cuda_executor(1, control, 0x11, flags, 64, kernel);
  Program both("buffer");
  both.wait(flags + 8, 0, 1, "data from");
  both.after(kCopyStream);
  both.copy(kCopyStream, memory.piece(1, 0, 0), 0, 0, 64, 1, 0);
  both.set(kCopyStream, memory.ready(1, 0), 0);
  std::vector<char> data(64);
  const std::vector<uint64_t> argument{reinterpret_cast<uint64_t>(data.data())};
  together(3, [&](int i) {
    if (i == 2) {  // late: the watcher looks at the flags by then
      pause(1500);
      __atomic_store_n(Memory::word(flags + 8), kFirst, __ATOMIC_RELEASE);
      return;
    }
    for (int n = 0; n < 50; ++n) executor->issue(both, 0, kFirst, 0x5, argument, 0);
  });
  std::string said[3];
  together(3, [&](int i) {
    if (i) pause(100);
    try {
      i ? executor->close() : executor->issue(both, 0, kFirst + 1, 0x5, argument, 0);
    } catch (const std::runtime_error& error) {
      said[i] = error.what();
    }
  });
  CHECK(said[1].empty() && said[2].empty() && has(control.broken().value_or(""), "has waited 2."));
  executor.reset();
  CHECK(fake_live() == before);
}

const std::pair<const char*, void (*)()> kScenarios[] = {
    {"processes", processes}, {"killed", killed},     {"forked", forked},   {"threads", threads},
    {"mismatch", mismatch},   {"breaking", breaking}, {"closing", closing}, {"cuda", cuda},
};

}  // namespace

int main(int count, char** names) {
  alarm(100);  // a hang ends by a signal
  for (const auto& [name, run] : kScenarios) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted |= !std::strcmp(names[i], name);
    if (!wanted) continue;
    const auto begin = Clock::now();
    run();
    std::printf("%s %.1f s\n", name, std::chrono::duration<double>(Clock::now() - begin).count());
    std::fflush(stdout);
  }
  return 0;
}
