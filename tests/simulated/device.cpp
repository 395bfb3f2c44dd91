// A CUDA device that is none: tensors say they are on `cuda`, in memory of the host, and the CPU's kernels compute.
//
// For a torch that was built without CUDA. What only shows on an accelerator shows here: tensors of two devices in one
// operation, collectives of a kind of tensors that NCCL has not, backwards in threads of their own, generators of the
// device, and what makes the host wait for the device. Nothing is asynchronous, and nothing is fast.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto TYPE = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex COUNT = 8;
thread_local c10::DeviceIndex current = 0;

// ---------------------------------------------------------------- devices, memory, generators

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return {TYPE, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(TYPE, current);
    uncheckedSetDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Used {  // of all devices: a process uses one
  std::mutex lock;
  std::unordered_map<void*, size_t> bytes;
  size_t now = 0, most = 0;
} used;

void release(void* data) {
  if (data != nullptr) {
    std::lock_guard guard(used.lock);
    used.now -= used.bytes[data];
    used.bytes.erase(data);
  }
  c10::free_cpu(data);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) {
      std::lock_guard guard(used.lock);
      used.bytes[data] = bytes;
      used.most = std::max(used.most, used.now += bytes);
    }
    return {data, data, &release, c10::Device(TYPE, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(TYPE, &memory);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl(0) {
    device_ = c10::Device(TYPE, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < COUNT; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all[index < 0 ? current : index];
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return COUNT; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current;
    if (index >= 0) current = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, current}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
};

}  // namespace

namespace at {
using SimulatedHooks = Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}  // namespace at

namespace {

// ---------------------------------------------------------------- what makes the host wait

PyObject* listener = nullptr;
thread_local int computing = 0;  // the CPU's kernels copy from and to the device

void host_waits(const char* why) {
  if (listener == nullptr || computing > 0) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::reinterpret_borrow<pybind11::object>(listener)(why);
}

void check_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.device().type() == to.device().type()) return;
  if (to.device().is_cpu()) {
    host_waits("a copy from the device");
  } else if (!non_blocking) {
    host_waits("a copy to the device");
  }
}

// ---------------------------------------------------------------- operations

at::Tensor on_host(const at::Tensor& x) {  // the same memory
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(c10::kCPU).requires_grad(false));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto* held = storage.unsafeGetStorageImpl();
  auto fresh = memory.allocate(bytes);
  if (bytes > 0 && held->data() != nullptr) std::memcpy(fresh.get(), held->data(), std::min(bytes, held->nbytes()));
  held->set_data_ptr_noswap(std::move(fresh));
  held->set_nbytes(bytes);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.numel() == 0) return self;
  check_copy(from, self, non_blocking);
  at::NoGradGuard no_grad;
  const auto to = self.device().is_cpu() ? self : on_host(self);
  to.copy_(from.device().is_cpu() ? from : on_host(from));
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto result = to;
  return copy_(result, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& x) {
  host_waits("a number from the device");
  return on_host(x).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  auto* held = self.unsafeGetTensorImpl();
  held->set_sizes_contiguous(sizes);
  const size_t bytes = (held->storage_offset() + held->numel()) * held->itemsize();
  if (held->storage().nbytes() < bytes) resize_storage(held->storage(), bytes);
  return self;
}

at::Tensor& set_(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset.has_value()) start = offset->guard_int(__FILE__, __LINE__);
  return at::cpu::as_strided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// Changes its running averages, which its schema does not say, so that the rule for all others would lose them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  const auto given = [](const std::optional<at::Tensor>& of) {
    return of.has_value() && of->defined() ? std::optional<at::Tensor>(on_host(*of)) : std::nullopt;
  };
  const auto [y, saved_mean, saved_deviation] = at::native_batch_norm(
      on_host(x), given(weight), given(bias), given(mean), given(variance), training, momentum, eps);
  const auto there = [&](const at::Tensor& result) { return result.to(x.device(), true); };
  return {there(y), there(saved_mean), there(saved_deviation)};
}

void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto check = [&](const at::Tensor& x) {  // numbers, and indices in optional lists, may come from the host
    TORCH_CHECK(!x.defined() || x.device().type() == TYPE || x.dim() == 0,
                "Expected all tensors to be on the same device, but ", op.schema().operator_name(), " got ", x.sizes(),
                " on ", x.device());
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) check(argument.toTensor());
    if (argument.isTensorList()) {
      for (const at::Tensor& x : argument.toTensorVector()) check(x);
    }
  }
}

// Any other operation: by the CPU's kernel. Random numbers come from the device's generator.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto n = op.schema().arguments().size();
  check_devices(op, torch::jit::last(*stack, n));
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    host_waits(op.schema().name().c_str());
  }
  struct Computing {
    Computing() { computing++; }
    ~Computing() { computing--; }
  } now;
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  auto generator = default_generator(-1);
  for (auto i = stack->size() - n; i < stack->size(); i++) {
    auto& argument = (*stack)[i];
    if (!argument.isGenerator()) continue;
    generator = argument.toGenerator();
    TORCH_CHECK(generator.device().type() == TYPE, "Expected a 'cuda' device type for generator");
    argument = c10::IValue();
  }
  auto host = at::detail::getDefaultCPUGenerator();
  const auto before = host.get_state();
  host.set_state(generator.get_state());
  at::native::cpu_fallback(op, stack);
  generator.set_state(host.get_state());
  host.set_state(before);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("resize_", resize_);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("native_batch_norm", native_batch_norm);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

// ---------------------------------------------------------------- collectives

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
template <typename T>
using Pointer = c10::intrusive_ptr<T>;

at::Tensor sent(const at::Tensor& x) {
  TORCH_CHECK(x.device().type() == TYPE, "No backend type associated with device type ", x.device().type());
  TORCH_CHECK(x.is_contiguous(), "Tensors must be contiguous");
  return on_host(x);
}
Tensors sent(const Tensors& tensors) {
  Tensors found;
  for (const auto& x : tensors) found.push_back(sent(x));
  return found;
}
Lists sent(const Lists& lists) {
  Lists found;
  for (const auto& tensors : lists) found.push_back(sent(tensors));
  return found;
}

// In place of NCCL: another backend sends what lies in the device's memory.
struct Collectives final : c10d::Backend {
  explicit Collectives(Pointer<c10d::Backend> by) : c10d::Backend(by->getRank(), by->getSize()), by(std::move(by)) {}
  const std::string getBackendName() const override { return "simulated"; }
  void setSequenceNumberForGroup() override { by->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return by->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { by->setTimeout(timeout); }
  Pointer<Work> broadcast(Tensors& x, const c10d::BroadcastOptions& options) override {
    auto host = sent(x);
    return by->broadcast(host, options);
  }
  Pointer<Work> allreduce(Tensors& x, const c10d::AllreduceOptions& options) override {
    auto host = sent(x);
    return by->allreduce(host, options);
  }
  Pointer<Work> allreduce_coalesced(Tensors& x, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = sent(x);
    return by->allreduce_coalesced(host, options);
  }
  Pointer<Work> reduce(Tensors& x, const c10d::ReduceOptions& options) override {
    auto host = sent(x);
    return by->reduce(host, options);
  }
  Pointer<Work> allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto host_out = sent(out);
    auto host_in = sent(in);
    return by->allgather(host_out, host_in, options);
  }
  Pointer<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto host_out = sent(out), host_in = sent(in);
    return by->_allgather_base(host_out, host_in, options);
  }
  Pointer<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                const c10d::AllgatherOptions& options) override {
    auto host_out = sent(out), host_in = sent(in);
    return by->allgather_into_tensor_coalesced(host_out, host_in, options);
  }
  Pointer<Work> gather(Lists& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto host_out = sent(out);
    auto host_in = sent(in);
    return by->gather(host_out, host_in, options);
  }
  Pointer<Work> scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& options) override {
    auto host_out = sent(out);
    auto host_in = sent(in);
    return by->scatter(host_out, host_in, options);
  }
  Pointer<Work> reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& options) override {
    auto host_out = sent(out);
    auto host_in = sent(in);
    return by->reduce_scatter(host_out, host_in, options);
  }
  Pointer<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                     const c10d::ReduceScatterOptions& options) override {
    auto host_out = sent(out), host_in = sent(in);
    return by->_reduce_scatter_base(host_out, host_in, options);
  }
  Pointer<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                const c10d::ReduceScatterOptions& options) override {
    auto host_out = sent(out), host_in = sent(in);
    return by->reduce_scatter_tensor_coalesced(host_out, host_in, options);
  }
  Pointer<Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                              std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto host_out = sent(out), host_in = sent(in);
    return by->alltoall_base(host_out, host_in, out_sizes, in_sizes, options);
  }
  Pointer<Work> send(Tensors& x, int to, int tag) override {
    auto host = sent(x);
    return by->send(host, to, tag);
  }
  Pointer<Work> recv(Tensors& x, int from, int tag) override {
    auto host = sent(x);
    return by->recv(host, from, tag);
  }
  Pointer<Work> barrier(const c10d::BarrierOptions& options) override { return by->barrier(options); }

  Pointer<c10d::Backend> by;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("COUNT") = static_cast<int>(COUNT);
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { current = static_cast<c10::DeviceIndex>(index); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("used", [] { return used.now; });
  m.def("most_used", [] { return used.most; });
  m.def("forget_most_used", [] { used.most = used.now; });
  m.def("resize_storage", [](const at::Tensor& of, size_t bytes) { resize_storage(of.storage(), bytes); });
  m.def("listen", [](pybind11::object heard) {
    Py_CLEAR(listener);
    if (!heard.is_none()) listener = heard.release().ptr();
  });
  m.def("collectives", [](Pointer<c10d::Backend> by) -> Pointer<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(by));
  });
}
