// What XLA calls: checks the arrays, chooses the instruction set, and runs the pass over time.
#include <atomic>
#include <string>
#include <thread>

#include "problem.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// --- The threads of a call

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

struct Tasks {
  alignas(128) std::atomic<long> open{0};  // tasks that nobody has begun
  alignas(128) std::atomic<long> done{0};
  std::atomic<bool> over{false};
  void (*call)(const void*, long, int) = nullptr;
  const void* function = nullptr;

  void work(int me) {
    for (long n = open.load(std::memory_order_acquire); n > 0;)
      if (open.compare_exchange_weak(n, n - 1, std::memory_order_acq_rel)) {
        call(function, n - 1, me);
        done.fetch_add(1, std::memory_order_release);
        n = open.load(std::memory_order_acquire);
      }
  }
  static void wait(long spins) {
    if (spins < 4000) PAUSE();
    else std::this_thread::yield();
  }
};

template <class Schedule>
Team::Team(int threads, Schedule schedule) : threads(threads) {
  if (threads < 2) return;
  tasks = std::make_shared<Tasks>();
  for (int i = 1; i < threads; i++)
    schedule([tasks = tasks, i] {
      for (long spins = 0; !tasks->over.load(std::memory_order_acquire); Tasks::wait(spins++)) tasks->work(i);
    });
}

Team::~Team() {
  if (tasks) tasks->over.store(true, std::memory_order_release);
}

void Team::run(long n, void (*call)(const void*, long, int), const void* function) {
  if (!tasks || n < 2) {
    for (long i = 0; i < n; i++) call(function, i, 0);
    return;
  }
  tasks->call = call, tasks->function = function;
  tasks->done.store(0, std::memory_order_relaxed);
  tasks->open.store(n, std::memory_order_release);
  tasks->work(0);
  for (long spins = 0; tasks->done.load(std::memory_order_acquire) < n; spins++) Tasks::wait(spins);
}

// --- The instruction set

extern const Kernel kernel_avx512, kernel_avx2, kernel_generic;

static const Kernel& kernel() {
#if defined(__x86_64__)
  static const char* asked = getenv("JAXGRU_CPU_KERNEL");
  static const Kernel& chosen = [&]() -> const Kernel& {
    __builtin_cpu_init();
    const std::string most = asked ? asked : "";
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (v4 && most != "avx2" && most != "generic") return kernel_avx512;
    return v3 && most != "generic" ? kernel_avx2 : kernel_generic;
  }();
  return chosen;
#else
  return kernel_generic;
#endif
}

// --- The arrays

using Array = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

class Checks {  // of shapes and dtypes; an empty array is an absent one
  std::string wrong;

 public:
  template <class T>
  T* get(const Array& array, ffi::DataType dtype, std::initializer_list<long> shape, const char* name, bool optional = false) {
    if (optional && array.element_count() == 0) return nullptr;
    const auto seen = array.dimensions();
    bool right = array.element_type() == dtype && seen.size() == shape.size();
    for (size_t i = 0; right && i < seen.size(); i++) right = seen[i] == shape.begin()[i];
    if (!right && wrong.empty()) wrong = std::string(name) + " has another shape or dtype than the layer's sizes say";
    return static_cast<T*>(array.untyped_data());
  }
  float* floats(const Array& array, std::initializer_list<long> shape, const char* name, bool optional = false) {
    return get<float>(array, ffi::F32, shape, name, optional);
  }
  Sequence sequence(const Array& array, long T, long B, long n, bool batch_major, const char* name, bool optional = false) {
    float* first = batch_major ? floats(array, {B, T, n}, name, optional) : floats(array, {T, B, n}, name, optional);
    if (B == 1) return {first, n, n};
    return batch_major ? Sequence{first, n, T * n} : Sequence{first, B * n, n};
  }
  void require(bool condition, const char* what) {
    if (!condition && wrong.empty()) wrong = what;
  }
  bool failed() const { return !wrong.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument("jaxgru's kernel: " + wrong + "."); }
};

static int threads_of(ffi::ThreadPool& pool, int64_t most) {
  const int64_t n = pool.num_threads();
  return (int)std::max<int64_t>(1, std::min<int64_t>({n, most, 64}));
}

static long size(const Array& array, size_t axis) {
  return array.dimensions().size() > axis ? array.dimensions()[axis] : 0;
}

// What both passes are given: x or ids, table, W, U, Un, h0, c0, reset, real, keep, h_reset, c_reset
static void common(Problem& p, Checks& checks, int64_t kind, bool reverse, bool batch_major, const Array& x, const Array& ids, const Array& table,
                   const Array& W, const Array& U, const Array& Un, const Array& h0, const Array& c0,
                   const Array& reset, const Array& real, const Array& keep, const Array& scale, const Array& h_reset,
                   const Array& c_reset) {
  checks.require(0 <= kind && kind < 4, "no such cell");
  p.kind = (Kind)kind, p.reverse = reverse;
  const long gates[] = {1, 4, 3, 3}, G = gates[kind & 3];
  const bool looked_up = ids.element_count(), lstm = p.kind == Kind::LSTM, before = p.kind == Kind::GRU_BEFORE;
  p.B = size(h0, 0), p.H = size(h0, 1);
  p.T = looked_up ? size(ids, 0) : size(x, batch_major ? 1 : 0);
  p.E = looked_up ? 0 : size(x, 2), p.V = looked_up ? size(table, 0) : 0;
  const long T = p.T, B = p.B, E = p.E, H = p.H;
  checks.require(T > 0 && B > 0 && H > 0 && (looked_up ? p.V > 0 : E > 0), "a size is 0");
  p.h0 = checks.floats(h0, {B, H}, "h0");
  p.c0 = lstm ? checks.floats(c0, {B, H}, "c0") : nullptr;
  if (looked_up) {
    p.ids = checks.get<int32_t>(ids, ffi::S32, {T, B}, "ids");
    p.table = checks.floats(table, {p.V, G * H}, "table");
  } else {
    p.x = checks.sequence(x, T, B, E, batch_major, "x");
    p.W = checks.floats(W, {E, G * H}, "W");
  }
  p.U = checks.floats(U, {H, before ? 2 * H : G * H}, "U");
  p.Un = before ? checks.floats(Un, {H, H}, "Un") : nullptr;
  p.reset = checks.get<bool>(reset, ffi::PRED, {T, B}, "reset", true);
  p.real = checks.get<bool>(real, ffi::PRED, {T, B}, "real", true);
  p.keep = checks.get<bool>(keep, ffi::PRED, {T, B, H}, "keep", true);
  const float* factor = checks.floats(scale, {}, "scale");
  p.h_reset = checks.floats(h_reset, {B, H}, "h_reset", true);
  p.c_reset = lstm ? checks.floats(c_reset, {B, H}, "c_reset", true) : nullptr;
  if (!checks.failed()) p.scale = *factor;
}

static ffi::Error run(const Problem& p, ffi::ThreadPool& pool, int64_t threads, bool (*pass)(const Problem&, Team&)) {
  Team team(threads_of(pool, threads), [&](auto f) { pool.Schedule(std::move(f)); });
  if (pass(p, team)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxgru's kernel: there is no memory left.");
}

static ffi::Error Forward(ffi::ThreadPool pool, int64_t kind, int64_t threads, bool reverse, bool batch_major, bool save,
                          Array x, Array ids, Array table, Array W, Array U, Array Un, Array h0, Array c0,
                          Array reset, Array real, Array keep, Array scale, Array h_reset, Array c_reset, Array b, Array cn,
                          Result y, Result c, Result saved) {
  Problem p{};
  Checks checks;
  common(p, checks, kind, reverse, batch_major, x, ids, table, W, U, Un, h0, c0, reset, real, keep, scale, h_reset, c_reset);
  if (checks.failed()) return checks.error();
  const long T = p.T, B = p.B, H = p.H;
  p.save = save;
  if (!p.ids) p.b = checks.floats(b, {size(W, 1)}, "b");
  if (p.kind == Kind::GRU_AFTER) p.cn = checks.floats(cn, {H}, "cn");
  p.y = checks.sequence(*y, T, B, H, batch_major, "y");
  if (p.kind == Kind::LSTM) {
    if (c->dimensions().size() == 3) p.c = checks.sequence(*c, T, B, H, batch_major, "c");
    else p.c_last = checks.floats(*c, {B, H}, "c");
  }
  if (save) p.saved = checks.floats(*saved, {T, B, kernel().saved_floats(p.kind, H)}, "saved");
  checks.require(!save || p.kind != Kind::LSTM || p.c, "c of each step is needed for the gradient");
  if (checks.failed()) return checks.error();
  return run(p, pool, threads, kernel().forward);
}

static ffi::Error Backward(ffi::ThreadPool pool, int64_t kind, int64_t threads, bool reverse, bool batch_major,
                           Array x, Array ids, Array table, Array W, Array U, Array Un, Array h0, Array c0,
                           Array reset, Array real, Array keep, Array scale, Array h_reset, Array c_reset, Array y, Array c,
                           Array saved, Array dy, Array dc, Array dh_last, Array dc_last,
                           Result dx, Result dtable, Result dW, Result db, Result dU, Result dUn, Result dcn,
                           Result dh0, Result dc0, Result dh_reset, Result dc_reset) {
  Problem p{};
  Checks checks;
  common(p, checks, kind, reverse, batch_major, x, ids, table, W, U, Un, h0, c0, reset, real, keep, scale, h_reset, c_reset);
  if (checks.failed()) return checks.error();
  const long T = p.T, B = p.B, E = p.E, H = p.H, GH = size(p.ids ? table : W, 1);
  p.saved = checks.floats(saved, {T, B, kernel().saved_floats(p.kind, H)}, "saved");
  p.y = checks.sequence(y, T, B, H, batch_major, "y");
  p.dy = checks.sequence(dy, T, B, H, batch_major, "dy");
  p.dh_last = checks.floats(dh_last, {B, H}, "dh_last");
  if (p.ids) {
    p.dtable = checks.floats(*dtable, {p.V, GH}, "dtable");
  } else {
    p.dx = checks.sequence(*dx, T, B, E, batch_major, "dx", true);
    p.dW = checks.floats(*dW, {E, GH}, "dW"), p.db = checks.floats(*db, {GH}, "db");
  }
  p.dU = checks.floats(*dU, {H, size(U, 1)}, "dU");
  p.dh0 = checks.floats(*dh0, {B, H}, "dh0");
  p.dh_reset = checks.floats(*dh_reset, {B, H}, "dh_reset", true);
  if (p.kind == Kind::GRU_BEFORE) p.dUn = checks.floats(*dUn, {H, H}, "dUn");
  if (p.kind == Kind::GRU_AFTER) p.dcn = checks.floats(*dcn, {H}, "dcn");
  if (p.kind == Kind::LSTM) {
    p.c = checks.sequence(c, T, B, H, batch_major, "c");
    p.dc = checks.sequence(dc, T, B, H, batch_major, "dc", true);
    p.dc_last = checks.floats(dc_last, {B, H}, "dc_last");
    p.dc0 = checks.floats(*dc0, {B, H}, "dc0");
    p.dc_reset = checks.floats(*dc_reset, {B, H}, "dc_reset", true);
  }
  if (checks.failed()) return checks.error();
  return run(p, pool, threads, kernel().backward);
}

#define A .Arg<Array>()
#define R .Ret<ffi::AnyBuffer>()
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgru_forward, Forward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("kind").Attr<int64_t>("threads").Attr<bool>("reverse").Attr<bool>("batch_major").Attr<bool>("save")
                              A A A A A A A A A A A A A A A A R R R);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgru_backward, Backward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("kind").Attr<int64_t>("threads").Attr<bool>("reverse").Attr<bool>("batch_major")
                              A A A A A A A A A A A A A A A A A A A A A R R R R R R R R R R R);

extern "C" {
const char* jaxgru_jaxlib() { return JAXLIB; }
const char* jaxgru_instructions() { return kernel().name; }
long jaxgru_saved_floats(int kind, long H) { return kernel().saved_floats((Kind)kind, H); }
void jaxgru_gates(const float* x, float* tanh, float* sigmoid, long n) { kernel().gates(x, tanh, sigmoid, n); }
double jaxgru_peak(long repeats) { return kernel().peak(repeats); }
}
