// Tensors of a device in host memory: of PyTorch's HPU dispatch key, or of its spare one (PrivateUse1), as `install` is
// asked. Every operator is done by the CPU's kernel, and noted: its name, shapes, types and numbers, as a graph compiler
// would tell programs apart. What a device cannot do without waiting for it (copies to the host, reading a number) is
// counted, and refused where a test says so.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto SPARE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex MOST = 8;

c10::DeviceType kind = SPARE;  // what is emulated in this process
c10::DeviceIndex there = 0;    // how many of it
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current; }

// ---- What is noted ------------------------------------------------------------------------------------------------

struct Notes {
  int64_t operators = 0, to_device = 0, to_host = 0, numbers_read = 0, in_segment = 0;
  std::array<int64_t, MOST> allocated{}, peak{};                   // bytes of each device
  uint64_t segment = 0;                                            // hash of what was asked for since the last cut
  std::set<uint64_t> recipes;                                      // hash of every single operator met
  std::map<std::pair<std::string, std::string>, int64_t> by_type;  // (operator, type of its first tensor) -> times
  std::map<uint64_t, int64_t> graphs;  // in lazy mode: hash of a segment -> times it was run
  bool lazy = false, syncs_refused = false, closed = false;
} notes;
std::mutex mutex;
thread_local int inside = 0;  // within a CPU kernel, whose copies are none of the device's

uint64_t mixed(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211ull + 0x9e3779b97f4a7c15ull; }

uint64_t hashed(const at::Tensor& tensor) {
  uint64_t hash = mixed(17, (uint64_t)tensor.scalar_type());
  for (auto size : tensor.sizes()) hash = mixed(hash, size + 7);
  return hash;
}

uint64_t hashed(const c10::IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined()) return 3;
    // A number on the host becomes part of the program.
    if (tensor.is_cpu() && tensor.dim() == 0) return hashed(c10::IValue(tensor.item()));
    return hashed(tensor);
  }
  if (value.isDouble()) {
    uint64_t bits;
    double number = value.toDouble();
    std::memcpy(&bits, &number, sizeof bits);
    return mixed(5, bits);
  }
  if (value.isInt()) return mixed(6, value.toInt());
  if (value.isBool()) return mixed(8, value.toBool());
  if (value.isList()) {
    uint64_t hash = 9;
    for (const auto& item : value.toListRef()) hash = mixed(hash, hashed(item));
    return hash;
  }
  return 4;
}

void note(const std::string& name, uint64_t arguments, const at::Tensor& first) {
  std::lock_guard<std::mutex> guard(mutex);
  uint64_t hash = mixed(std::hash<std::string>()(name), arguments);
  notes.operators++, notes.in_segment++;
  notes.segment = mixed(notes.segment, hash);
  notes.by_type[{name, c10::toString(first.defined() ? first.scalar_type() : at::kFloat)}]++;
  bool met = !notes.recipes.insert(hash).second;
  TORCH_CHECK(met || notes.lazy || !notes.closed, "emulated device: ", name, " has shapes or numbers that it did not have before");
}

void run_segment() {  // in lazy mode: what was collected is compiled, unless it was before, and run
  std::lock_guard<std::mutex> guard(mutex);
  auto segment = notes.segment;
  auto operators = notes.in_segment;
  notes.segment = 0, notes.in_segment = 0;
  if (!notes.lazy || operators == 0) return;
  TORCH_CHECK(notes.graphs.count(segment) || !notes.closed, "emulated device: a new graph, of ", operators, " operators");
  notes.graphs[segment]++;
}

void sync(const char* what) {  // the host waits, for all that was collected too
  TORCH_CHECK(!notes.syncs_refused, "emulated device: the host waits for the device (", what, ")");
  run_segment();
}

// ---- Memory, device, hooks ----------------------------------------------------------------------------------------

struct Memory final : c10::Allocator {
  struct Head {
    size_t bytes;
    c10::DeviceIndex device;
  };
  static constexpr size_t HEAD = 64;
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kind, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    std::lock_guard<std::mutex> guard(mutex);
    static const char* set = std::getenv("KILN_EMULATED_MEMORY");
    static const int64_t capacity = set ? std::atoll(set) : INT64_MAX;
    TORCH_CHECK(notes.allocated[current] + (int64_t)bytes <= capacity, "NPU out of memory. Tried to allocate ", bytes,
                " bytes (NPU ", int(current), "; ", capacity, " total capacity; ", notes.allocated[current], " already allocated)");
    char* start = (char*)std::aligned_alloc(HEAD, (bytes + HEAD - 1) / HEAD * HEAD + HEAD);
    *(Head*)start = {bytes, current};
    notes.allocated[current] += bytes;
    notes.peak[current] = std::max(notes.peak[current], notes.allocated[current]);
    return {start + HEAD, start + HEAD, &release, device};
  }
  static void release(void* data) {
    if (data == nullptr) return;
    char* start = (char*)data - HEAD;
    {
      std::lock_guard<std::mutex> guard(mutex);
      notes.allocated[((Head*)start)->device] -= ((Head*)start)->bytes;
    }
    std::free(start);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

struct Pinned final : c10::Allocator {  // memory of the host that a device can read by itself
  static inline std::map<const char*, size_t> held;
  c10::DataPtr allocate(size_t bytes) override {
    char* start = bytes ? (char*)std::malloc(bytes) : nullptr;
    std::lock_guard<std::mutex> guard(mutex);
    if (start) held[start] = bytes;
    return {start, start, &release, c10::kCPU};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      held.erase((char*)data);
    }
    std::free(data);
  }
  static bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(mutex);
    auto next = held.upper_bound((const char*)data);
    return next != held.begin() && (--next)->first + next->second > (const char*)data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static Stream stream(Device device) { return Stream(Stream::DEFAULT, Device(kind, index_of(device))); }
  c10::DeviceType type() const override { return kind; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kind, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index_of(device) < there, "emulated device: there are ", int(there), ", and no ", device);
    current = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
  Stream getStream(Device device) const noexcept override { return stream(device); }
  Stream getDefaultStream(Device device) const override { return stream(device); }
  Stream getNewStream(Device device, int) const override { return stream(device); }
  Stream exchangeStream(Stream given) const noexcept override { return stream(given.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return there; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
} device_guard;

template <class Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return there; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device_guard.setDevice({kind, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return device_guard.exchangeDevice({kind, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {kind, ((Memory::Head*)((char*)data - Memory::HEAD))->device};
  }
  bool isPinnedPtr(const void* data) const override { return Pinned::holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

struct HpuHooks final : Hooks<at::HPUHooksInterface> {
  bool hasHPU() const override { return true; }
};

void grow(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard on(storage.device());
  auto data = memory.allocate(bytes);
  if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

struct SpareHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
};

}  // namespace

namespace at::native {
at::Tensor view(const at::Tensor&, at::IntArrayRef);
}

namespace {

// ---- Operators that are more than a CPU kernel --------------------------------------------------------------------

c10::DispatchKey key() { return kind == SPARE ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::HPU; }

bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kind; }

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory, as a CPU's tensor
  if (!on_device(tensor)) return tensor;
  char* start = (char*)tensor.storage().mutable_data();
  return at::from_blob(start == nullptr ? nullptr : start + tensor.storage_offset() * tensor.itemsize(), tensor.sizes(),
                       tensor.strides(), tensor.options().device(c10::kCPU).requires_grad(false));
}

at::Tensor moved(const at::Tensor& computed, c10::Device device) {  // a kernel's result, copied to the device
  if (!computed.defined()) return computed;
  c10::DeviceGuard on(device);
  auto rows = computed.contiguous();
  auto found =
      at::detail::empty_generic(rows.sizes(), &memory, c10::DispatchKeySet(key()), rows.scalar_type(), std::nullopt);
  if (rows.numel()) std::memcpy(found.storage().mutable_data(), rows.const_data_ptr(), rows.nbytes());
  return found;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(device.value_or(c10::Device(kind)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(key()),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard on(device.value_or(c10::Device(kind)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(key()), c10::dtype_or_default(type));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->guard_int(__FILE__, __LINE__);
  return at::cpu::as_strided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  dim = at::maybe_wrap_dim(dim, self.dim(), true);
  std::vector<int64_t> sizes(self.sizes().begin(), self.sizes().end()), strides(self.strides().begin(), self.strides().end());
  if (sizes.empty()) return at::cpu::as_strided(self, {size}, {1}, self.storage_offset());
  sizes.push_back(size), strides.push_back(strides[dim]);
  sizes[dim] = (sizes[dim] - size) / step + 1;
  strides[dim] *= step;
  return at::cpu::as_strided(self, sizes, strides, self.storage_offset());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!inside) {
    if (on_device(from) && !on_device(to)) {
      sync("a copy to the host");
      std::lock_guard<std::mutex> guard(mutex);
      notes.to_host++;
    } else if (!on_device(from)) {
      // As torch_npu has it.
      TORCH_CHECK(kind != SPARE || to.is_contiguous() || !to.is_contiguous(at::MemoryFormat::ChannelsLast),
                  "emulated device: it takes tensors in contiguous_format alone");
      std::lock_guard<std::mutex> guard(mutex);
      notes.to_device++;
    } else {
      note("aten::copy_", mixed(hashed(from), hashed(to)), from);
    }
  }
  if (to.numel()) on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar read_number(const at::Tensor& self) {
  if (!inside) {
    sync(".item()");
    std::lock_guard<std::mutex> guard(mutex);
    notes.numbers_read++;
  }
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (impl->numel() + impl->storage_offset()) * self.itemsize();
  if (impl->unsafe_storage().nbytes() < bytes) grow(impl->unsafe_storage(), bytes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize(to, at::fromIntArrayRefSlow(from.sizes()), std::nullopt);
  if (to.numel()) on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor& set_storage_and_shape(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                                  c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                              offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  c10::SymInt count((int64_t)(storage.nbytes() / self.itemsize())), one(1);
  return set_storage_and_shape(self, storage, 0, c10::SymIntArrayRef(&count, 1), c10::SymIntArrayRef(&one, 1));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(other.storage());
  impl->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  return self;
}

void check_together(const std::string& name, const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), name, ": Expected all tensors to be on the same device, but found at least two devices, ",
              one.device(), " and ", other.device(), "!");
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  check_together("convolution", input, weight);
  note("aten::convolution", mixed(hashed(input), hashed(weight)), input);
  std::optional<at::Tensor> given;
  if (bias && bias->defined()) given = on_host(*bias);
  return moved(at::convolution_symint(on_host(input), on_host(weight), given, stride, padding, dilation, transposed,
                                      output_padding, groups),
               input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  note("aten::convolution_backward", mixed(hashed(grad), hashed(weight)), grad);
  std::vector<c10::SymInt> bias{transposed ? groups * weight.sym_size(1) : weight.sym_size(0)};
  auto found = at::convolution_backward_symint(on_host(grad), on_host(input), on_host(weight), c10::SymIntArrayRef(bias),
                                               stride, padding, dilation, transposed, output_padding, groups, mask);
  auto device = grad.device();
  return {moved(std::get<0>(found), device), moved(std::get<1>(found), device), moved(std::get<2>(found), device)};
}

const std::set<std::string> DATA_DEPENDENT{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal",
                                           "aten::is_nonzero"};

void check_devices(const std::string& name, const c10::IValue& value, const at::Tensor& first) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined() && (tensor.dim() > 0 || on_device(tensor))) check_together(name, first, tensor);
  } else if (value.isTensorList()) {
    for (const auto& item : value.toListRef()) check_devices(name, item, first);
  }
}

at::Tensor first_on_device(at::ArrayRef<c10::IValue> values) {
  for (const auto& value : values) {
    if (value.isTensor() && value.toTensor().defined() && on_device(value.toTensor())) return value.toTensor();
    if (value.isTensorList())
      if (auto found = first_on_device(value.toListRef()); found.defined()) return found;
  }
  return {};
}

void any_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& name = handle.schema().operator_name().name;
  size_t count = handle.schema().arguments().size();
  auto arguments = at::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count, count);
  auto first = first_on_device(arguments);
  uint64_t hash = 1;
  for (const auto& value : arguments) {
    if (first.defined()) check_devices(name, value, first);
    hash = mixed(hash, hashed(value));
  }
  if (DATA_DEPENDENT.count(name)) {
    sync(name.c_str());
    std::lock_guard<std::mutex> guard(mutex);
    notes.numbers_read++;
  }
  note(name, hash, first);
  struct Within {
    Within() { inside++; }
    ~Within() { inside--; }
  } within;
  at::native::cpu_fallback(handle, stack, /*error_on_views=*/true);
}

void register_operators(torch::Library& m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_number);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_and_shape);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

#define IN_HALF(...) KERNEL(KIND, __VA_ARGS__, lower_precision_fp)
#define IN_FLOAT(...) KERNEL(KIND, __VA_ARGS__, fp32)
#define FLOAT_OUT(...) KERNEL(KIND, __VA_ARGS__, fp32_set_opt_dtype)
#define IN_WIDEST(...) KERNEL(KIND, __VA_ARGS__, promote)
template <c10::DeviceType KIND>
void register_casts(torch::Library& m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(IN_HALF)
  AT_FORALL_FP32(IN_FLOAT)
  AT_FORALL_PROMOTE(IN_WIDEST)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT_OUT)
}

void install(bool spare, c10::DeviceIndex devices) {
  TORCH_CHECK(there == 0, "one device is emulated in a process");
  TORCH_CHECK(devices > 0 && devices <= MOST, "from 1 to ", int(MOST), " devices are emulated");
  kind = spare ? SPARE : c10::DeviceType::HPU;
  there = devices;
  c10::SetAllocator(kind, &memory);
  c10::impl::DeviceGuardImplRegistrar(kind, &device_guard);
  if (spare) {
    at::RegisterPrivateUse1HooksInterface(new SpareHooks());
  } else {
    at::HPUHooksRegistry()->Register("HPUHooks", [](at::HPUHooksArgs) { return std::make_unique<HpuHooks>(); });
  }
  // Kept to the end of the process: what goes takes its kernels along.
  auto library = [](const char* of, c10::DispatchKey where) -> torch::Library& {
    return *new torch::Library(torch::Library::IMPL, of, where, __FILE__, __LINE__);
  };
  auto casts = spare ? c10::DispatchKey::AutocastPrivateUse1 : c10::DispatchKey::AutocastHPU;
  library("_", key()).fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  auto& aten = library("aten", key());
  register_operators(aten);
  // PyTorch's own, out of other operators, takes no layout but one.
  if (spare) aten.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  library("_", casts).fallback(torch::CppFunction::makeFallthrough());
  if (spare) {
    register_casts<SPARE>(library("aten", casts));
  } else {
    register_casts<c10::DeviceType::HPU>(library("aten", casts));
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &install);
  m.def("on_host", [](const at::Tensor& tensor) {  // which stays as long as what it gives
    auto shared = on_host(tensor);
    return at::from_blob(shared.data_ptr(), shared.sizes(), shared.strides(), [tensor](void*) {}, shared.options());
  });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { device_guard.setDevice({kind, c10::DeviceIndex(index)}); });
  m.def("counts", [] {
    std::lock_guard<std::mutex> guard(mutex);
    return std::map<std::string, int64_t>{{"operators", notes.operators},
                                          {"to_device", notes.to_device},
                                          {"to_host", notes.to_host},
                                          {"numbers_read", notes.numbers_read},
                                          {"recipes", (int64_t)notes.recipes.size()}};
  });
  m.def("run_segment", &run_segment);
  m.def("graphs", [] {
    std::lock_guard<std::mutex> guard(mutex);
    return notes.graphs;
  });
  m.def("set_lazy", [](bool lazy) { notes.lazy = lazy; });
  m.def("by_type", [] {
    std::lock_guard<std::mutex> guard(mutex);
    return notes.by_type;
  });
  m.def("refuse_syncs", [](bool refused) { notes.syncs_refused = refused; });
  m.def("close", [](bool closed) { notes.closed = closed; });
  m.def("memory", [](int index) {  // bytes in use, and the most so far
    std::lock_guard<std::mutex> guard(mutex);
    return std::make_pair(notes.allocated.at(index), notes.peak.at(index));
  });
  m.def("forget_peak", [](int index) { notes.peak.at(index) = notes.allocated.at(index); });
}
