// The threads of one call: the calling one, and those of XLA's pool that are free.
//
// The calling thread takes every task that nobody has begun, and waits only for tasks that run. So a
// call never waits for a thread to become free.
#pragma once
#include <memory>

struct Tasks;

class Team {
  std::shared_ptr<Tasks> tasks;
  void run(long n, void (*call)(const void*, long, int), const void* function);

 public:
  const int threads;

  template <class Schedule>  // schedule(f) runs f() on another thread, at some time or never
  Team(int threads, Schedule schedule);
  ~Team();
  Team(const Team&) = delete;

  // Calls f(i, the thread's number) for 0 ≤ i < n, in any order
  template <class F>
  __attribute__((always_inline)) void each(long n, const F& f) {
    run(n, [](const void* f, long i, int me) { (*static_cast<const F*>(f))(i, me); }, &f);
  }
};
