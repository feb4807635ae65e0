// A simulated accelerator for torch (PrivateUse1). It is as late as a GPU may be, and as strict.
//
//     copy ──push──► Queue (a stream: a thread, in order) ──its turn──► reads the raw address in the host's memory
//                      └──mark──► Moment (an event), passes when all that was pushed before is done
//
// As CUDA and torch's allocators have it:
// - A copy from page-locked memory reads it when its turn comes. One from other memory reads it before the call returns.
// - The host can't read device memory: a read of its addresses is a SIGSEGV. Queues use a view of it elsewhere.
// - A freed block of device memory goes to the next tensor of its stream and size at once. If record_stream() told of
//   other streams, it first waits for what they have to do at the time of the free.
// - A freed block of pinned memory waits for the copies that read it, if they could tell that it is this block: by its
//   first address, or by the storage's context. They can't if NumPy has made the tensor's memory a view.
// - In a fork of the process, the device raises an error.
//
// Copies to the device and on it run on the stream. Those to the host, and other operators, wait for it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <condition_variable>
#include <deque>
#include <future>
#include <thread>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;
using Moment = std::shared_future<void>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;
constexpr int kNumStreams = 33;  // the default stream, and 32 that are handed out in turn, as torch does for CUDA
constexpr size_t kArenaBytes = size_t(4) << 30;

std::atomic<bool> is_forked = false;
std::atomic<int64_t> copy_delay_us = 0;

enum Count { kDirect, kStaged, kAwaited, kViolations, kNumCounts };
std::atomic<int64_t> counts[kNumCounts] = {};

void check_not_forked() { TORCH_CHECK(!is_forked, "Cannot re-initialize the simulated device in forked subprocess"); }

// Streams -------------------------------------------------------------------------------------------------------------

class Queue {
 public:
  Queue() { std::thread([this] { run(); }).detach(); }

  void push(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  Moment mark() {  // passes with the end of the promise, which the task holds
    auto promise = std::make_shared<std::promise<void>>();
    push([promise] {});
    return promise->get_future().share();
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty();
  }

 private:
  void run() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();  // and what the task held is gone, before the next one
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
};

// What threads use is never destroyed: they run until the process ends.
auto& queues_mutex = *new std::mutex;
auto& queues = *new std::map<std::pair<DeviceIndex, StreamId>, Queue>;
std::atomic<StreamId> num_streams_made = 0;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_streams[kNumDevices] = {};

Stream stream_of(DeviceIndex device, StreamId id) { return Stream(Stream::UNSAFE, Device(kSim, device), id); }

Stream current_stream(Device device) {
  DeviceIndex index = device.has_index() ? device.index() : current_device;
  return stream_of(index, current_streams[index]);
}

Queue& queue_of(const Stream& stream) {
  check_not_forked();
  std::lock_guard lock(queues_mutex);
  return queues[{stream.device_index(), stream.id()}];
}

// Memory --------------------------------------------------------------------------------------------------------------

struct Memory {
  char* start;
  size_t nbytes;
  std::shared_ptr<char> token = std::make_shared<char>();  // work that is queued and uses the memory has it, too

  bool is_used() const { return token.use_count() > 1; }
  bool has(const void* address) const { return address >= start && address < start + nbytes; }
  void use_on(const Stream& stream) const {
    queue_of(stream).push([token = token] {});
  }
};

struct Block : Memory {
  bool is_free = false;
  Stream stream = stream_of(0, 0);  // of device memory: where it was allocated
  std::vector<Stream> other_streams = {};
};

void free_device_block(void* block);
void free_host_block(void* block);

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  DeviceMemory() {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    start_ = static_cast<char*>(mmap(nullptr, 2 * kArenaBytes, PROT_NONE, flags, -1, 0));
    TORCH_CHECK(start_ != MAP_FAILED && !mprotect(view(start_), kArenaBytes, PROT_READ | PROT_WRITE));
  }

  static char* view(void* address) { return static_cast<char*>(address) + kArenaBytes; }

  c10::DataPtr allocate(size_t nbytes) override {
    check_not_forked();
    Stream stream = current_stream(Device(kSim));
    nbytes = std::max<size_t>(512, (nbytes + 511) / 512 * 512);
    std::lock_guard lock(mutex_);
    auto block = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& one) {
      return one.is_free && one.stream == stream && one.nbytes == nbytes && !one.is_used();
    });
    auto& stats = stats_[stream.device_index()];
    if (block == blocks_.end()) {
      TORCH_CHECK(num_reserved_ + nbytes <= kArenaBytes, "the simulated device is out of memory");
      block = blocks_.insert(block, Block{{start_ + num_reserved_, nbytes}, false, stream});
      num_reserved_ += nbytes;
      stats.reserved_bytes[0].increase(nbytes);
    }
    block->is_free = false;
    stats.allocated_bytes[0].increase(nbytes);
    return {block->start, &*block, &free_device_block, stream.device()};
  }

  void free(Block& block) {
    std::lock_guard lock(mutex_);
    for (const Stream& stream : block.other_streams) block.use_on(stream);
    block.other_streams.clear();
    block.is_free = true;
    stats_[block.stream.device_index()].allocated_bytes[0].decrease(block.nbytes);
  }

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    check_not_forked();
    std::lock_guard lock(mutex_);
    auto* block = static_cast<Block*>(pointer.get_context());
    if (block->stream != stream) block->other_streams.push_back(stream);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return stats_[device];
  }

  void resetPeakStats(DeviceIndex device) override { stats_[device].allocated_bytes[0].reset_peak(); }
  void resetAccumulatedStats(DeviceIndex) override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not on the host"); }

 private:
  std::mutex mutex_;
  char* start_;
  size_t num_reserved_ = 0;
  std::list<Block> blocks_;
  c10::CachingDeviceAllocator::DeviceStats stats_[kNumDevices];
};

class HostMemory final : public at::HostAllocator {  // that is page-locked
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    nbytes = std::bit_ceil(std::max<size_t>(nbytes, 4096));
    std::lock_guard lock(mutex_);
    auto block = std::find_if(blocks_.begin(), blocks_.end(), [=](const Block& one) {
      return one.is_free && one.nbytes == nbytes && !one.is_used();
    });
    if (block == blocks_.end())
      block = blocks_.insert(block, Block{{static_cast<char*>(aligned_alloc(4096, nbytes)), nbytes}});
    block->is_free = false;
    return {block->start, &*block, &free_host_block, at::kCPU};
  }

  void free(Block& block) {
    std::lock_guard lock(mutex_);
    block.is_free = true;
  }

  bool record_event(void* address, void* context, Stream stream) override {
    std::lock_guard lock(mutex_);
    auto block = std::find_if(blocks_.begin(), blocks_.end(), [=](const Block& one) {
      return one.start == address || &one == context;
    });
    if (block != blocks_.end()) block->use_on(stream);
    return block != blocks_.end();
  }

  int register_range(char* start, size_t nbytes) {
    std::lock_guard lock(mutex_);
    for (const Memory& one : registered_)
      if (one.has(start) || (start <= one.start && one.start < start + nbytes)) return 712;
    registered_.push_back({start, nbytes});
    return 0;
  }

  int unregister_range(char* start) {
    std::lock_guard lock(mutex_);
    auto range = std::find_if(registered_.begin(), registered_.end(), [=](auto& one) { return one.start == start; });
    if (range == registered_.end()) return 713;
    if (range->is_used()) counts[kViolations]++;  // a copy would read what comes to this address
    registered_.erase(range);
    return 0;
  }

  std::optional<Memory> page_locked(const void* address) {
    std::lock_guard lock(mutex_);
    for (const Memory& one : registered_)
      if (one.has(address)) return one;
    for (const Block& one : blocks_)
      if (one.has(address)) return Memory{one.start, one.nbytes};  // a copy of its own has to tell whose it is
    return std::nullopt;
  }

  size_t num_registered() {
    std::lock_guard lock(mutex_);
    return registered_.size();
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  std::mutex mutex_;
  std::list<Block> blocks_;
  std::list<Memory> registered_;
};

auto& device_memory = *new DeviceMemory;
auto& host_memory = *new HostMemory;
REGISTER_ALLOCATOR(kSim, &device_memory);
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &host_memory);

void free_device_block(void* block) {
  if (!is_forked) device_memory.free(*static_cast<Block*>(block));  // a fork has no streams, and maybe a locked mutex
}

void free_host_block(void* block) {
  if (!is_forked) host_memory.free(*static_cast<Block*>(block));
}

// What torch asks of a device -----------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  Device getDevice() const override { return Device(kSim, current_device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "there are only ", kNumDevices, " simulated devices");
    current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override { return current_stream(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(getStream(device).device_index(), 0); }
  Stream getNewStream(Device device, int) const override {
    return stream_of(getStream(device).device_index(), 1 + num_streams_made++ % (kNumStreams - 1));
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream).mark().wait(); }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (StreamId id = 0; id < kNumStreams; id++)
      synchronizeStream(stream_of(getStream(Device(kSim, device)).device_index(), id));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }

  // torch keeps an event's `void*`, which is null until it was recorded.
  static Moment& moment_of(void* event) { return *static_cast<Moment*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    moment_of(*event) = queue_of(stream).mark();
  }
  void block(void* event, const Stream& stream) const override {
    if (event) queue_of(stream).push([moment = moment_of(event)] { moment.wait(); });
  }
  bool queryEvent(void* event) const override {
    check_not_forked();
    return !event || moment_of(event).wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void synchronizeEvent(void* event) const override {
    check_not_forked();
    if (event) moment_of(event).wait();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  bool isPinnedPtr(const void* address) const override { return host_memory.page_locked(address).has_value(); }
};

// Operators -----------------------------------------------------------------------------------------------------------

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, std::optional<Device> device,
                     std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, c10::dtype_or_default(dtype));
}

// A view for the CPU, by address: it keeps nothing alive.
Tensor raw(const Tensor& tensor) {
  void* address = tensor.is_cpu() ? tensor.data_ptr() : DeviceMemory::view(tensor.data_ptr());
  return at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Tensor copy(const Tensor& source, const Tensor& target, bool non_blocking) {
  Stream stream = current_stream(target.is_cpu() ? source.device() : target.device());
  Queue& queue = queue_of(stream);
  if (!source.numel()) return target;
  if (!source.is_cpu() && source.device() != target.device()) queue_of(current_stream(source.device())).mark().wait();
  bool is_plain = source.dtype() == target.dtype() && source.sizes() == target.sizes() &&
                  source.strides() == target.strides() && source.is_non_overlapping_and_dense();
  Tensor from = raw(source), to = raw(target);
  bool is_from_host = source.is_cpu(), is_awaited = target.is_cpu();
  std::optional<Memory> locked;
  if (is_from_host) {
    is_awaited = !non_blocking;
    locked = is_plain ? host_memory.page_locked(source.data_ptr()) : std::nullopt;
    if (!locked) from = source.clone();
    if (locked && !locked->has(static_cast<char*>(source.data_ptr()) + source.nbytes() - 1)) counts[kViolations]++;
    counts[locked ? kDirect : kStaged]++;
  }
  queue.push([=, nbytes = source.nbytes(), locked = locked]() mutable {
    if (is_from_host) std::this_thread::sleep_for(std::chrono::microseconds(copy_delay_us));
    is_plain ? void(memcpy(to.data_ptr(), from.data_ptr(), nbytes)) : void(at::native::copy_(to, from, false));
  });
  if (locked) host_memory.record_event(source.data_ptr(), source.storage().data_ptr().get_context(), stream);
  if (is_awaited) queue.mark().wait();
  counts[kAwaited] += is_awaited;
  return target;
}

Tensor copy_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy(source, target, false);
}

at::Scalar item(const Tensor& tensor) {
  queue_of(current_stream(tensor.device())).mark().wait();
  return at::native::_local_scalar_dense_cpu(raw(tensor));
}

void record_stream(Tensor& tensor, Stream stream) { device_memory.recordStream(tensor.storage().data_ptr(), stream); }

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("_copy_from", copy);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

}  // namespace

// What Python calls, without the GIL ----------------------------------------------------------------------------------

extern "C" {

void sim_start() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

bool sim_is_forked() { return is_forked; }

void sim_set_copy_delay(int64_t us) { copy_delay_us = us; }

void sim_stall(int64_t us) {
  queue_of(current_stream(Device(kSim))).push([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}

int sim_register(char* start, size_t nbytes) { return is_forked ? 3 : host_memory.register_range(start, nbytes); }

int sim_unregister(char* start) { return is_forked ? 3 : host_memory.unregister_range(start); }

int64_t sim_num_registered() { return host_memory.num_registered(); }

int64_t sim_count(Count which) { return counts[which]; }

}  // extern "C"
