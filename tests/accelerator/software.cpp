// A device of two indices that lives in host memory, for tests: torch's PrivateUse1.
//
// What a test can tell from a CPU is here: memory that is counted for each index and runs out,
// random streams of the indices' own (a seed and an offset, as of a counter-based generator), a
// current device, streams and events, autocast. The arithmetic is the CPU's: an operator without a
// kernel here runs on copies in host memory, so the peak of an index is that of its tensors.
//
// Once an order is set, streams are asynchronous. A copy on a stream other than the default runs as
// late as the stream's events and synchronizations allow, as early, or at random; freed memory is
// overwritten and given out again at once. Kernels run when they are called, after all that their
// stream waits for. So that such a kernel counts as late, too, a copy that reads or writes memory of
// another stream without waiting for it finds nothing there, whatever the order (`Streams`).
//
// It refuses what CUDA refuses, in CUDA's words: tensors of two devices in one kernel, a generator of
// another device, a kernel that CUDA does not have or that is not deterministic there. Its addresses
// are none of the host's, so that reading them ends the process.

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/empty_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// of the Python that loads this
extern "C" {
int Py_IsInitialized();
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, COUNT> streams{};

c10::DeviceIndex checked(c10::DeviceIndex index) {
  if (index < 0) return current;
  TORCH_CHECK(index < COUNT, "device ", int(index), " of ", int(COUNT));
  return index;
}

// ---- memory

// a bit that no address of the host has
constexpr uintptr_t DEVICE_BIT = uintptr_t(1) << 55;

void* device_address(void* host) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | DEVICE_BIT);
}

void* host_address(const void* device) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) & ~DEVICE_BIT);
}

// a stream and its device
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
// for each stream up to which of its tasks another one, or the host, has waited
using Known = std::map<StreamKey, uint64_t>;

struct Block {
  c10::DeviceIndex index;
  size_t size;
  StreamKey owner;     // the stream that it was allocated on
  Known written, read;  // the last task of each stream that wrote it, and that read it
};

// ---- streams: what is queued on them, and in which order it runs

enum class Order { SYNCHRONOUS, LATE, EARLY, RANDOM };

struct Task {
  uint64_t number;
  std::function<void()> run;  // a copy, or a wait for another stream
};

struct Queue {
  uint64_t count = 0;  // tasks so far, kernels included
  Known known;
  std::deque<Task> tasks;
};

struct Event {
  std::chrono::steady_clock::time_point at;
  StreamKey stream;
  uint64_t count = 0;
  Known known;
};

void join(Known& known, const Known& other) {
  for (const auto& [stream, count] : other) known[stream] = std::max(known[stream], count);
}

bool includes(const Known& known, const Known& other) {
  return std::all_of(other.begin(), other.end(), [&](const auto& entry) {
    const auto found = known.find(entry.first);
    return entry.second == 0 || (found != known.end() && found->second >= entry.second);
  });
}

// waits without Python's lock, for which a thread may wait that holds the mutex
struct Mutex {
  std::recursive_mutex mutex;

  void lock() {
    if (mutex.try_lock()) return;
    const bool has_python = Py_IsInitialized() && PyGILState_Check();
    auto* thread = has_python ? PyEval_SaveThread() : nullptr;
    mutex.lock();
    if (has_python) PyEval_RestoreThread(thread);
  }
  void unlock() { mutex.unlock(); }
};

struct Streams {
  Mutex mutex;
  Order order = Order::SYNCHRONOUS;
  std::mt19937 random;
  std::map<StreamKey, Queue> queues;
  Known host;  // what the host has waited for

  static Streams& get() {
    static auto* streams = new Streams();
    return *streams;
  }

  bool is_asynchronous() const { return order != Order::SYNCHRONOUS; }

  // runs the tasks of a stream up to a number
  void run(StreamKey stream, uint64_t number) {
    auto& queue = queues[stream];
    while (!queue.tasks.empty() && queue.tasks.front().number <= number) {
      auto task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      task.run();
    }
  }
  void run(StreamKey stream) { run(stream, queues[stream].count); }
  void run_all() {
    for (auto& entry : queues) run(entry.first);
  }

  // runs what the order runs before the host goes on
  void pass_time() {
    if (order == Order::EARLY) run_all();
    if (order != Order::RANDOM) return;
    for (auto& [stream, queue] : queues)
      if (!queue.tasks.empty() && random() % 3 == 0)
        run(stream, queue.tasks.front().number + random() % 3);
  }

  // counts the next task of a stream, which comes after all that the host has waited for
  Queue& next(StreamKey stream) {
    auto& queue = queues[stream];
    join(queue.known, host);
    queue.known[stream] = ++queue.count;
    return queue;
  }
  void add(StreamKey stream, std::function<void()> run) {
    // it may run where modes of Python or transforms are active
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    queues[stream].tasks.push_back({queues[stream].count, [keys, run = std::move(run)] {
                                      const c10::impl::ForceDispatchKeyGuard guard(keys);
                                      run();
                                    }});
    pass_time();
  }
  void wait(StreamKey stream, const Event& event) {
    join(next(stream).known, event.known);
    add(stream, [this, other = event.stream, count = event.count] { run(other, count); });
  }
  // the host waits for tasks of a stream
  void synchronize(StreamKey stream, uint64_t count, const Known& known) {
    run(stream, count);
    join(host, known);
  }
  void synchronize(StreamKey stream) {
    synchronize(stream, queues[stream].count, queues[stream].known);
  }

  // notes that the latest task of a stream uses memory; returns whether it has waited for all that
  // others have written there, and if it writes itself, read there
  bool use(Block& block, StreamKey stream, bool writes) {
    const auto& queue = queues[stream];
    const bool is_ordered = includes(queue.known, block.written) &&
                            (!writes || includes(queue.known, block.read));
    if (writes) block.read.clear(), block.written = {{stream, queue.count}};
    else block.read[stream] = queue.count;
    return is_ordered;
  }
};

StreamKey current_stream(c10::DeviceIndex index) { return {index, streams[index]}; }

// numbers that no program computes by chance: floats of them are not numbers
void overwrite(void* place, size_t size) { std::memset(host_address(place), 0xFF, size); }

struct Memory final : c10::DeviceAllocator {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  // while streams are asynchronous, freed memory by its size, which the next of that size gets
  std::map<size_t, std::vector<void*>> freed;
  std::array<c10::CachingDeviceAllocator::DeviceStats, COUNT> stats;
  std::array<size_t, COUNT> total{size_t(8) << 30, size_t(8) << 30};

  static Memory& get() {
    static auto* memory = new Memory();
    return *memory;
  }

  // bytes of the index in use, and how often memory was asked for
  static void free_block(void* place) {
    auto& self = get();
    auto& streams = Streams::get();
    std::lock_guard order(streams.mutex);
    std::lock_guard lock(self.mutex);
    auto found = self.blocks.find(place);
    if (found == self.blocks.end()) return;
    // it is free for those that come later on its stream
    if (streams.is_asynchronous()) streams.run(found->second.owner);
    const auto size = found->second.size;
    auto& stats = self.stats[found->second.index];
    stats.allocated_bytes[0].decrease(size);
    stats.reserved_bytes[0].decrease(size);
    stats.allocation[0].decrease(1);
    self.blocks.erase(found);
    if (!streams.is_asynchronous()) return std::free(host_address(place));
    overwrite(place, size);
    self.freed[rounded(size)].push_back(place);
  }

  static size_t rounded(size_t size) { return (size + 63) / 64 * 64; }

  // host memory for a block: what was freed last, or new
  void* place_of(size_t size) {
    auto& places = freed[rounded(size)];
    if (places.empty()) return device_address(std::aligned_alloc(64, rounded(size)));
    auto* place = places.back();
    places.pop_back();
    return place;
  }
  void release_freed() {
    std::lock_guard lock(mutex);
    for (auto& [size, places] : freed)
      for (auto* place : places) std::free(host_address(place));
    freed.clear();
  }

  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(TYPE, current);
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    auto& streams = Streams::get();
    std::lock_guard order(streams.mutex);
    std::lock_guard lock(mutex);
    auto& mine = stats[current];
    const auto used = size_t(mine.allocated_bytes[0].current);
    TORCH_CHECK_WITH(OutOfMemoryError, used + size <= total[current], "out of memory: ", size,
                     " bytes on index ", int(current), ", where ", used, " are in use");
    void* place = place_of(size);
    mine.allocated_bytes[0].increase(size);
    mine.reserved_bytes[0].increase(size);
    mine.allocation[0].increase(1);
    Block block{current, size, current_stream(current), {}, {}};
    if (streams.is_asynchronous()) {
      overwrite(place, size);
      // earlier tasks of the stream may still use it
      block.written[block.owner] = streams.queues[block.owner].count;
    }
    blocks[place] = block;
    return {place, place, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(host_address(to), host_address(from), size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    return stats[checked(index)];
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    stats[checked(index)].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    stats[checked(index)].allocated_bytes[0].reset_peak();
    stats[checked(index)].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex);
    const auto chosen = checked(index);
    return {total[chosen] - size_t(stats[chosen].allocated_bytes[0].current), total[chosen]};
  }
};

// host memory of which it is known that it is pinned, as reducers of gradients want it
struct Pinned final : c10::Allocator {
  std::mutex mutex;
  std::unordered_map<const void*, Block> blocks;

  static Pinned& get() {
    static auto* pinned = new Pinned();
    return *pinned;
  }

  static void free_block(void* place) {
    auto& self = get();
    auto& streams = Streams::get();
    std::lock_guard order(streams.mutex);
    // torch's allocators wait until copies from and to it are done
    streams.run_all();
    std::lock_guard lock(self.mutex);
    self.blocks.erase(place);
    std::free(place);
  }

  c10::DataPtr allocate(size_t size) override {
    void* place = std::aligned_alloc(64, (size / 64 + 1) * 64);
    std::lock_guard lock(mutex);
    blocks[place] = {};
    return {place, place, &free_block, c10::kCPU};
  }
  Block* find(const void* place) {
    std::lock_guard lock(mutex);
    const auto found = blocks.find(place);
    return found == blocks.end() ? nullptr : &found->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

// ---- the current device, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current}; }
  void setDevice(c10::Device device) const override { current = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, {TYPE, index}, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = checked(device.index());
    return stream(index, streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(checked(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<c10::StreamId> latest{0};
    return stream(checked(device.index()), ++latest);
  }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    const auto before = getStream(wanted.device());
    streams[wanted.device_index()] = wanted.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    auto& streams = Streams::get();
    std::lock_guard lock(streams.mutex);
    const auto& queue = streams.queues[key(stream)];
    *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), key(stream), queue.count,
                                    queue.known};
    streams.pass_time();
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto& streams = Streams::get();
    std::lock_guard lock(streams.mutex);
    if (streams.is_asynchronous()) streams.wait(key(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    const auto& asked = *static_cast<Event*>(event);
    return is_done(asked.stream, asked.count);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_done(key(stream), Streams::get().queues[key(stream)].count);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& streams = Streams::get();
    std::lock_guard lock(streams.mutex);
    streams.synchronize(key(stream));
  }
  void synchronizeEvent(void* event) const override {
    auto& streams = Streams::get();
    std::lock_guard lock(streams.mutex);
    const auto& asked = *static_cast<Event*>(event);
    streams.synchronize(asked.stream, asked.count, asked.known);
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    auto& streams = Streams::get();
    std::lock_guard lock(streams.mutex);
    for (auto& entry : streams.queues)
      if (entry.first.first == checked(index)) streams.synchronize(entry.first);
  }
  static StreamKey key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  // one more task is done for each question, so that a host which asks until it is done goes on
  static bool is_done(StreamKey stream, uint64_t count) {
    auto& streams = Streams::get();
    std::lock_guard lock(streams.mutex);
    auto& queue = streams.queues[stream];
    if (queue.tasks.empty() || queue.tasks.front().number > count) return true;
    streams.run(stream, queue.tasks.front().number);
    return false;
  }
  double elapsedTime(void* one, void* other, c10::DeviceIndex) const override {
    const auto span = static_cast<Event*>(other)->at - static_cast<Event*>(one)->at;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

// what runs on the current stream of an index now, after all that the stream waits for
struct Kernel {
  static inline thread_local bool runs = false;
  const bool around = runs;

  explicit Kernel(c10::DeviceIndex index) {
    auto& streams = Streams::get();
    if (!around && streams.is_asynchronous()) {
      std::lock_guard lock(streams.mutex);
      const auto stream = current_stream(index);
      streams.pass_time();
      streams.next(stream);
      streams.run(stream);
    }
    runs = true;
  }
  ~Kernel() { runs = around; }
};

// ---- random streams: a state of 16 bytes, and each kernel's numbers by its seed and offset

struct Stream final : c10::GeneratorImpl {
  uint64_t start = c10::default_rng_seed_val, offset = 0;

  explicit Stream(c10::DeviceIndex index)
      : GeneratorImpl({TYPE, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { start = seed, offset = 0; }
  void set_offset(uint64_t value) override { offset = value; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return start; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return start;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "a state has 16 bytes; got ", state.numel());
    const auto* words = static_cast<const uint64_t*>(state.data());
    start = words[0], offset = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::TensorOptions(at::kByte));
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = start, words[1] = offset;
    return state.getIntrusivePtr();
  }
  Stream* clone_impl() const override {
    auto* other = new Stream(device_.index());
    other->start = start, other->offset = offset;
    return other;
  }
  // the seed of one kernel's numbers (splitmix64), which are not those of the CPU
  uint64_t next() {
    uint64_t mixed = start + 0x9E3779B97F4A7C15 * ++offset;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    return mixed ^ (mixed >> 31);
  }
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = new std::array<at::Generator, COUNT>{
      at::make_generator<Stream>(0), at::make_generator<Stream>(1)};
  return (*generators)[checked(index)];
}

// ---- what torch asks a device

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = checked(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current, checked(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Stream>(checked(index));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::get(); }
  bool isPinnedPtr(const void* place) const override { return Pinned::get().find(place); }
  at::Device getDeviceFromPtr(void* place) const override {
    auto& memory = Memory::get();
    std::lock_guard lock(memory.mutex);
    return {TYPE, memory.blocks.at(place).index};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    const Kernel kernel(current);
    auto fresh = Memory::get().allocate(size);
    if (size > 0 && storage.nbytes() > 0)
      Memory::get().copy_data(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size);
  }
};

// ---- kernels: memory

bool fills() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::Tensor filled(at::Tensor fresh) {
  return fills() ? at::native::fill_empty_deterministic_(fresh) : fresh;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(TYPE, current)));
  return filled(at::detail::empty_generic(size, &Memory::get(),
                                          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(TYPE, current)));
  return filled(at::detail::empty_strided_generic(
      size, stride, &Memory::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype)));
}

// ---- what CUDA refuses

// the device of a kernel's tensors
struct OneDevice {
  std::optional<c10::Device> found;

  void add(const at::Tensor& tensor) {
    // a number may be the CPU's
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    TORCH_CHECK(!found || *found == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *found, " and ", tensor.device(), "!");
    found = tensor.device();
  }
  void add(const std::optional<at::Tensor>& tensor) {
    if (tensor.has_value()) add(*tensor);
  }
};

template <typename... Tensors>
void check_devices(const Tensors&... tensors) {
  OneDevice device;
  (device.add(tensors), ...);
}

using Names = std::unordered_set<std::string_view>;

// they take some of their tensors from the host
const Names TAKE_FROM_HOST{
    "_foreach_addcdiv",          "_foreach_addcdiv_", "_foreach_addcmul",
    "_foreach_addcmul_",         "_foreach_copy_",    "_pack_padded_sequence",
    "_pack_padded_sequence_backward"};

// CUDA multiplies matrices of floating point alone
const Names PRODUCTS{"addbmm", "addmm", "addmm_", "addmv", "baddbmm", "bmm",
                     "dot",    "mm",    "mv",     "outer", "vdot"};

// those that torch.use_deterministic_algorithms names
const Names NONDETERMINISTIC{"_adaptive_avg_pool2d_backward",
                             "_adaptive_avg_pool3d_backward",
                             "_ctc_loss_backward",
                             "adaptive_max_pool2d_backward",
                             "avg_pool3d_backward",
                             "fractional_max_pool2d_backward",
                             "fractional_max_pool3d_backward",
                             "grid_sampler_2d_backward",
                             "grid_sampler_3d_backward",
                             "histc",
                             "kthvalue",
                             "max_unpool2d",
                             "max_unpool3d",
                             "nll_loss2d_forward",
                             "put_",
                             "reflection_pad1d_backward",
                             "reflection_pad2d_backward",
                             "reflection_pad3d_backward",
                             "upsample_bicubic2d_backward",
                             "upsample_bilinear2d_backward",
                             "upsample_linear1d_backward",
                             "upsample_trilinear3d_backward"};

void check_as_cuda(const c10::OperatorHandle& operation, const torch::jit::Stack& stack) {
  // without "aten::"
  const auto name = std::string_view(operation.schema().name()).substr(6);
  TORCH_CHECK_NOT_IMPLEMENTED(name.find("mkldnn") == name.npos, "Could not run 'aten::", name,
                              "' with arguments from the accelerator: it is the CPU's");
  // with indices, of which there may be several
  const bool is_median = name == "median" && operation.schema().overload_name() == "dim";
  if (NONDETERMINISTIC.contains(name) || is_median)
    at::globalContext().alertNotDeterministic(name);
  OneDevice device;
  for (const auto& value : torch::jit::last(stack, operation.schema().arguments().size())) {
    TORCH_CHECK(!value.isGenerator() || value.toGenerator().device().type() == TYPE,
                "Expected a '", TYPE, "' device type for generator but found '",
                value.isGenerator() ? value.toGenerator().device().type() : TYPE, "'");
    // indices, which are lists of optional tensors, may be the CPU's
    if (TAKE_FROM_HOST.contains(name)) continue;
    if (value.isTensor()) device.add(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) device.add(tensor);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !PRODUCTS.contains(name) || !value.isTensor() ||
            !at::isIntegralType(value.toTensor().scalar_type(), true),
        "\"", name, "_cuda\" not implemented for '", value.toTensor().scalar_type(), "'");
  }
}

// ---- copies, views and kernels that are not all a fallback can do

// memory of a device, or pinned; null for any other of the host's
Block* block_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return Pinned::get().find(tensor.storage().data());
  auto& memory = Memory::get();
  std::lock_guard lock(memory.mutex);
  const auto found = memory.blocks.find(tensor.storage().mutable_data());
  return found == memory.blocks.end() ? nullptr : &found->second;
}

// notes that the latest task of a stream uses a tensor; returns whether it may
bool use(const at::Tensor& tensor, StreamKey stream, bool writes) {
  std::lock_guard lock(Streams::get().mutex);
  auto* block = block_of(tensor);
  return block == nullptr || Streams::get().use(*block, stream, writes);
}

// the same memory, as the CPU sees it
at::Tensor in_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  if (Kernel::runs && Streams::get().is_asynchronous())
    use(tensor, current_stream(tensor.device().index()), false);
  auto alias = at::from_blob(host_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
                             tensor.options().device(at::kCPU));
  if (tensor.is_conj()) alias = alias.conj();
  return tensor.is_neg() ? alias._neg_view() : alias;
}

// torch's own kernels of resize_ and set_ grow a storage as the CPU does
void grow(const at::Storage& storage, const at::Tensor& tensor, int64_t elements) {
  const auto size = size_t(elements) * tensor.itemsize();
  if (elements > 0 && size > storage.nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, size);
}

const at::Tensor& resized(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  const auto before = self.storage().nbytes();
  const auto elements = c10::multiply_integers(size);
  grow(self.storage(), self, elements > 0 ? self.storage_offset() + elements : 0);
  at::native::resize_(self, size, format);
  return fills() ? at::native::fill_resize_deterministic_(self, int64_t(before)) : self;
}

at::Tensor& set_strided(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto elements = c10::multiply_integers(size);
  if (stride.size() == size.size()) elements = at::native::storage_size_for(size, stride);
  grow(source, self, elements > 0 ? offset + elements : 0);
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

void copy_asynchronously(const at::Tensor& from, const at::Tensor& to, bool waits) {
  auto& streams = Streams::get();
  std::lock_guard lock(streams.mutex);
  const auto stream = current_stream((to.is_cpu() ? from : to).device().index());
  if (!Kernel::runs) streams.next(stream);
  const bool is_ordered = use(from, stream, false) & use(to, stream, true);
  const auto copy = [from = in_host(from), to = in_host(to)] { to.copy_(from); };
  if (Kernel::runs) return copy();
  if (is_ordered) streams.add(stream, copy);
  else streams.add(stream, [to = in_host(to)] { overwrite(to.data_ptr(), to.nbytes()); });
  // the host waits for memory of its own that is not pinned
  const bool is_pinned = block_of(from) != nullptr && block_of(to) != nullptr;
  if ((from.is_cpu() || to.is_cpu()) && (waits || !is_pinned)) streams.synchronize(stream);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool is_asynchronous) {
  if (Streams::get().is_asynchronous()) copy_asynchronously(from, to, !is_asynchronous);
  else in_host(to).copy_(in_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resized(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& tensor) {
  const Kernel kernel(tensor.device().index());
  return at::native::_local_scalar_dense_cpu(in_host(tensor));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = int64_t(source.nbytes() / self.itemsize());
  return set_strided(self, source, 0, {elements}, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, Memory::get().allocate(0),
                       &Memory::get(), true);
  return set_storage(self, storage);
}

// contiguous, as fake tensors have results of a backend of one's own, whatever layout the CPU chose
at::Tensor in_order(const at::Tensor& host, at::Device device) {
  return host.contiguous().to(device);
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  check_devices(input, weight, bias);
  const Kernel kernel(input.device().index());
  std::optional<at::Tensor> host_bias;
  if (bias.has_value() && bias->defined()) host_bias = in_host(*bias);
  return in_order(at::convolution(in_host(input), in_host(weight), host_bias, stride, padding,
                                  dilation, transposed, output_padding, groups),
                  input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  check_devices(gradient, input, weight);
  const Kernel kernel(input.device().index());
  const int64_t channels = gradient.size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      in_host(gradient), in_host(input), in_host(weight), channels, stride, padding, dilation,
      transposed, output_padding, groups, mask);
  const auto there = [&](const at::Tensor& host) {
    return host.defined() ? in_order(host, input.device()) : host;
  };
  return {there(of_input), there(of_weight), there(of_bias)};
}

// writes statistics that its schema does not declare as written, so that copies would not do
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& variance, bool trains, double momentum, double epsilon) {
  check_devices(input, weight, bias, mean, variance);
  const Kernel kernel(input.device().index());
  const auto host = [](const std::optional<at::Tensor>& given) {
    return given.has_value() && given->defined() ? std::optional(in_host(*given)) : std::nullopt;
  };
  auto [output, saved_mean, saved_variance] =
      at::native_batch_norm(in_host(input), host(weight), host(bias), host(mean), host(variance),
                            trains, momentum, epsilon);
  const auto device = input.device();
  return {output.to(device), saved_mean.to(device), saved_variance.to(device)};
}

// ---- all others: the CPU's, on copies; what draws, draws from the device's stream

void on_copies(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  check_as_cuda(operation, *stack);
  const auto count = operation.schema().arguments().size();
  c10::DeviceIndex index = current;
  Stream* stream = nullptr;
  for (auto place = stack->size() - count; place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == TYPE)
      index = value.toTensor().device().index();
    else if (value.isDevice() && value.toDevice().type() == TYPE)
      index = checked(value.toDevice().index());
    else if (value.isGenerator() && value.toGenerator().device().type() == TYPE) {
      stream = value.toGenerator().get<Stream>();
      value = c10::IValue();
    }
  }
  const c10::DeviceGuard guard(c10::Device(TYPE, index));
  const Kernel kernel(index);
  if (!operation.hasTag(at::Tag::nondeterministic_seeded)) {
    at::native::cpu_fallback(operation, stack);
    return;
  }
  static std::mutex drawing;
  std::lock_guard lock(drawing);
  if (stream == nullptr) stream = default_generator(index).get<Stream>();
  auto host = at::detail::getDefaultCPUGenerator();
  const auto before = host.get_state();
  const auto offset = stream->offset;
  host.set_current_seed(stream->next());
  const auto fresh = host.get_state();
  try {
    at::native::cpu_fallback(operation, stack);
  } catch (...) {
    host.set_state(before);
    throw;
  }
  if (host.get_state().equal(fresh)) stream->offset = offset;  // it drew nothing
  host.set_state(before);
}

c10::AllocatorRegisterer<TYPE> register_memory(&Memory::get());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("resize_", resized);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_strided);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_copies>());
}

// a copy reads conjugates and negatives itself
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(name) KERNEL_PRIVATEUSEONE(name, lower_precision_fp)
#define FULL(name) KERNEL_PRIVATEUSEONE(name, fp32)
  LOWER(linear) LOWER(matmul) LOWER(mm) LOWER(bmm) LOWER(addmm) LOWER(baddbmm)
  LOWER(conv1d) LOWER(conv2d) LOWER(conv3d) LOWER(scaled_dot_product_attention)
  FULL(layer_norm) FULL(nll_loss) FULL(mse_loss) FULL(cross_entropy_loss)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32) KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}

// what Python asks beside that
TORCH_LIBRARY(zoo_software, m) {
  m.def("default_generator(int index) -> Generator?",
        [](int64_t index) { return default_generator(c10::DeviceIndex(index)); });
  m.def("set_total(int index, int bytes) -> ()", [](int64_t index, int64_t bytes) {
    Memory::get().total[checked(c10::DeviceIndex(index))] = size_t(bytes);
  });
  m.def("set_order(int order, int seed) -> ()", [](int64_t order, int64_t seed) {
    auto& streams = Streams::get();
    std::lock_guard lock(streams.mutex);
    streams.run_all();
    streams.order = Order(order);
    streams.random.seed(uint32_t(seed));
    if (!streams.is_asynchronous()) Memory::get().release_freed();
  });
}
