// A team of threads that run one function together. The caller is member 0; the others spin briefly for the next run
// and then sleep, so that a waiting team leaves its cores to the scheduler and the client. Members that keep to cores of
// their own never share one for a while, which would double that step: every part of it waits for the slowest.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace stepwire {

// One pause is 40 to 140 cycles: 20 to 60 microseconds in all, longer than any phase of a small step is uneven.
constexpr int kSpins = 1000;

// A number that rises; waiters see it change by spinning, then by sleeping on it.
class Turnstile {
 public:
  uint32_t now() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
  }

  // Returns once the number is no longer `seen`.
  void wait(uint32_t seen) {
    for (int i = 0; i < kSpins; ++i) {
      if (now() != seen) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == seen) {
      syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

class Team {
 public:
  // cpus: the processor of each member but the caller, who sees to his own; null: wherever the system puts them. Raises
  // std::system_error where the system gives no more threads.
  Team(int size, const int* cpus) : size_(size) {
    try {
      for (int id = 1; id < size; ++id) {
        threads_.emplace_back([this, id, cpu = cpus == nullptr ? -1 : cpus[id]] {
          if (cpu >= 0) keep_to(cpu);
          work(id);
        });
      }
    } catch (...) {
      leave();
      throw;
    }
  }

  ~Team() { leave(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Every member calls job(id); returns when all have.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    next_.store(0, std::memory_order_relaxed);
    start_.advance();
    job(0);
    barrier();
  }

  // All members wait for each other; the work of next() begins anew.
  void barrier() {
    const uint32_t seen = gate_.now();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      gate_.advance();
    } else {
      gate_.wait(seen);
    }
  }

  // A piece [begin, end) of `total` items that nobody else has; false: none is left. Pieces shrink, so that a member
  // that lost its core holds the others up by little.
  bool next(int total, int& begin, int& end) {
    int at = next_.load(std::memory_order_relaxed);
    while (at < total) {
      const int share = (total - at) / (2 * size_);
      const int size = size_ == 1 ? total - at : share > 1 ? share : 1;
      if (next_.compare_exchange_weak(at, at + size, std::memory_order_relaxed)) {
        begin = at;
        end = at + size;
        return true;
      }
    }
    return false;
  }

 private:
  // A processor that may not be used is no error: the thread then stays where it is.
  static void keep_to(int cpu) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    sched_setaffinity(0, sizeof(own), &own);
  }

  void leave() {
    leaving_ = true;
    start_.advance();
    for (auto& thread : threads_) thread.join();
  }

  void work(int id) {
    uint32_t seen = 0;
    while (true) {
      start_.wait(seen);
      ++seen;
      if (leaving_) return;
      (*job_)(id);
      barrier();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  bool leaving_ = false;
  alignas(64) Turnstile start_;
  alignas(64) Turnstile gate_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace stepwire
