// The host's part of calls whose shapes are known: looked up, allocated and launched without Python.
//
// Python plans a call and has Triton launch it once (launching.py). What the launches were given is
// then kept here under all that tells one call from another but addresses (`Key`): the function,
// its grid, and its parameters with addresses left open (native_launch.h). `attend` is the one
// function that Python calls for a known call. Gradients are computed the same way; a backward pass
// that is not known goes to Python (`Entry::slow`), which makes it known. A scoring function in the
// call is asked by `score`.
//
// The driver is reached through a library's name, so that tests hand in one without a GPU.

#include <dlfcn.h>

#include <array>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include "native_launch.h"

namespace {

namespace py = pybind11;
using Key = std::vector<int64_t>;

// ---- What tells one call from another.

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (const int64_t x : key) hash = (hash ^ uint64_t(x)) * 0x9E3779B97F4A7C15u ^ hash >> 29;
    return hash;
  }
};

void add_layout(Key& key, const Tensor& tensor) {
  if (!tensor.defined()) {
    key.push_back(-1);
    return;
  }
  const auto& sizes = tensor.sizes();
  const auto& strides = tensor.strides();
  key.push_back(int64_t(sizes.size()) << 32 | int64_t(tensor.scalar_type()) << 16 |
                int64_t(tensor.device().type()) << 8 | (tensor.device().index() + 1));
  // Subclasses, transforms and lazy tensors differ here from an ordinary tensor.
  key.push_back(int64_t(tensor.key_set().raw_repr()));
  key.insert(key.end(), sizes.begin(), sizes.end());
  key.insert(key.end(), strides.begin(), strides.end());
}

bool aligned(const Tensor& tensor) {
  return !tensor.defined() || reinterpret_cast<uint64_t>(tensor.data_ptr()) % 16 == 0;
}

// An argument that is no tensor, with its type: 1 equals True in Python.
bool add_told(Key& key, PyObject* value) {
  if (value == Py_None) {
    key.push_back('N');
  } else if (PyBool_Check(value)) {
    key.insert(key.end(), {'b', value == Py_True});
  } else if (PyLong_CheckExact(value)) {
    int overflow = 0;
    key.insert(key.end(), {'i', PyLong_AsLongLongAndOverflow(value, &overflow)});
    return overflow == 0;
  } else if (PyFloat_CheckExact(value)) {
    int64_t bits = 0;
    const double number = PyFloat_AS_DOUBLE(value);
    std::memcpy(&bits, &number, sizeof bits);
    key.insert(key.end(), {'f', bits});
  } else if (PyUnicode_CheckExact(value)) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == nullptr) throw python_error();
    key.insert(key.end(), {'s', int64_t(length)});
    key.insert(key.end(), text, text + length);
  } else {
    return false;
  }
  return true;
}

// Query, key, value, scores, band and mask.
constexpr size_t TENSORS = 6;
using Six = std::array<Tensor, TENSORS>;

// Return whether this is a call that can be known: what came in and what it is known by.
bool described(PyObject* const* values, Py_ssize_t count, Six& tensors, Key& key, bool& needs) {
  if (count < Py_ssize_t(TENSORS) || torch::jit::tracer::isTracing()) return false;
  key.reserve(160);
  for (size_t i = 0; i < TENSORS; i++) {
    if (values[i] != Py_None) {
      if (!THPVariable_CheckExact(values[i])) return false;
      tensors[i] = THPVariable_Unpack(values[i]);
      if (tensors[i].layout() != at::kStrided || !tensors[i].has_storage()) return false;
      if (tensors[i]._fw_grad(0).defined() || !aligned(tensors[i])) return false;
    }
    add_layout(key, tensors[i]);
  }
  if (!tensors[0].defined() || !tensors[1].defined() || !tensors[2].defined()) return false;
  needs = false;
  if (at::GradMode::is_enabled()) {
    for (size_t i = 0; i < 4; i++) needs |= tensors[i].defined() && tensors[i].requires_grad();
    if (tensors[5].defined() && tensors[5].requires_grad()) return false;
  }
  // Modes, transforms and autocast stand in what the dispatcher includes and leaves out.
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto kind = tensors[0].device().type();
  const bool autocast = at::autocast::is_autocast_enabled(kind);
  key.insert(
      key.end(), {needs, int64_t(local.included_.raw_repr()), int64_t(local.excluded_.raw_repr()),
                  autocast ? int64_t(at::autocast::get_autocast_dtype(kind)) : -1});
  for (Py_ssize_t i = TENSORS; i < count; i++) {
    if (!add_told(key, values[i])) return false;
  }
  return true;
}

// ---- What is known of a call.

struct Entry : torch::CustomClassHolder {
  Pass forward;
  // Whether weights are dropped: each call then draws a seed.
  bool drops;
  // How the saved tensors lay: hooks may bring back others.
  Key saved;
  // What computes gradients in Python, and makes its launches known.
  PyObject* slow;
  std::mutex lock;
  // By which gradients are wanted and how the one that comes back lies.
  std::unordered_map<Key, std::shared_ptr<const Pass>, KeyHash> backward;

  ~Entry() override {
    const py::gil_scoped_acquire gil;
    Py_XDECREF(slow);
  }
};
using Known = c10::intrusive_ptr<Entry>;

// Forgetting all at once is simpler than forgetting the oldest.
constexpr size_t MOST_CALLS = 1024;
// Never destroyed: that would be after Python's end.
auto& calls = *new std::unordered_map<Key, Known, KeyHash>();
std::array<int64_t, 4> counts{};  // Calls known and not, backward passes known and not.

CUstream current_stream(at::Device device) {
  const auto found = py::reinterpret_steal<py::object>(
      PyObject_CallFunction(host.current_stream, "i", int(device.index())));
  if (!found) throw python_error();
  return reinterpret_cast<CUstream>(PyLong_AsUnsignedLongLong(found.ptr()));
}

// Whether a profiler wants to be told of every launch.
bool watched() {
  const auto hook = py::handle(host.hooks).attr("launch_enter_hook");
  return PyObject_IsTrue(py::getattr(hook, "calls", hook).ptr()) != 0;
}

Key layouts(at::ArrayRef<Tensor> tensors) {
  Key key;
  for (const auto& tensor : tensors) add_layout(key, tensor);
  return key;
}

// The operators know ten inputs; three of them no known call has. After the six stands the seed.
std::vector<Tensor> ten(at::ArrayRef<Tensor> seven) {
  std::vector<Tensor> all(seven.begin(), seven.end());
  // Scores of keys come after those of offsets.
  all.insert(all.begin() + 4, Tensor());
  all.resize(10);
  return all;
}

// As `ops.dropout.drawn_seed`: the same generator gives the same seeds.
Tensor drawn_seed(const Known& known, const Tensor& like) {
  if (!known->drops) return {};
  return at::randint((int64_t(1) << 31) - 1, {}, like.options().dtype(at::kInt));
}

struct Attention : torch::autograd::Function<Attention> {
  struct Rest {
    Tensor band, mask, seed;
    Known known;
    CUstream stream;
  };

  static Tensor forward(
      torch::autograd::AutogradContext* ctx, const Tensor& query, const Tensor& key,
      const Tensor& value, const std::optional<Tensor>& told_scores, const Rest& rest) {
    const Tensor scores = told_scores.value_or(Tensor());
    const auto made = rest.known->forward.run(
        ten({query, key, value, scores, rest.band, rest.mask, rest.seed}), query.device(),
        rest.stream);
    // In the order of `operators.Eager`: a checkpoint may go there the other time.
    ctx->save_for_backward(
        {made[0], made[1], query, key, value, scores, rest.band, rest.mask, rest.seed});
    ctx->saved_data["known"] = c10::IValue::make_capsule(rest.known);
    ctx->set_materialize_grads(false);
    return made[0];
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list gradients) {
    const Tensor& upstream = gradients[0];
    torch::autograd::variable_list found(5);
    if (!upstream.defined()) return found;
    const auto saved = ctx->get_saved_variables();
    const auto known = c10::static_intrusive_pointer_cast<Entry>(
        ctx->saved_data["known"].toCapsule());
    std::array<bool, 4> needs{};
    for (size_t i = 0; i < 4; i++) needs[i] = saved[2 + i].defined() && ctx->needs_input_grad(i);
    Key key{needs[0] | needs[1] << 1 | needs[2] << 2 | needs[3] << 3};
    add_layout(key, upstream);
    std::shared_ptr<const Pass> pass;
    const bool ordinary = !at::GradMode::is_enabled() && aligned(upstream) &&
        std::all_of(saved.begin(), saved.end(), aligned) && layouts(saved) == known->saved;
    if (ordinary) {
      const std::lock_guard<std::mutex> guard(known->lock);
      const auto at = known->backward.find(key);
      if (at != known->backward.end()) pass = at->second;
      counts[pass ? 2 : 3]++;
    }
    if (!pass) return slow(known, saved, upstream, needs, ordinary, key);
    CUstream stream = nullptr;
    {
      const py::gil_scoped_acquire gil;
      stream = current_stream(upstream.device());
    }
    auto given = ten({saved.data() + 2, TENSORS + 1});
    given.insert(given.end(), {upstream, Tensor(), saved[0], saved[1]});
    auto made = pass->run(given, upstream.device(), stream);
    for (size_t i = 0; i < 4; i++) {
      if (needs[i]) found[i] = std::move(made[i]);
    }
    return found;
  }

  static torch::autograd::variable_list slow(
      const Known& known, const std::vector<Tensor>& saved, const Tensor& upstream,
      const std::array<bool, 4>& needs, bool ordinary, const Key& key) {
    const py::gil_scoped_acquire gil;
    py::list tensors;
    for (const auto& tensor : saved) {
      tensors.append(tensor.defined() ? py::cast(tensor) : py::none());
    }
    const auto answer = py::reinterpret_borrow<py::object>(known->slow)(
        tensors, upstream, py::make_tuple(needs[0], needs[1], needs[2], needs[3]), ordinary);
    // The gradients, and the pass that has just been launched, if it can be again.
    const auto [gradients, recorded] = answer.cast<std::pair<py::sequence, py::object>>();
    torch::autograd::variable_list found(5);
    for (size_t i = 0; i < 4; i++) {
      if (!gradients[i].is_none()) found[i] = gradients[i].cast<Tensor>();
    }
    if (!recorded.is_none()) {
      const std::lock_guard<std::mutex> guard(known->lock);
      known->backward[key] = *recorded.cast<py::capsule>().get_pointer<std::shared_ptr<Pass>>();
    }
    return found;
  }
};

// ---- A scoring function: its parameters in a row, one launch for scores, one for a band.

constexpr size_t MOST_PARAMETERS = 8;

struct Scorer : torch::CustomClassHolder {
  // From the row and T5's table; from these and the gradient of the scores.
  Pass forward, backward;
  Tensor table;
  std::vector<std::vector<int64_t>> sizes;
  // How parameters lie, and what the dispatcher includes, in a call of this kind.
  Key parameters;
  uint64_t included;
};

// Makes a second derivative an error where a first one is asked for with a graph of its own.
struct Once : torch::autograd::Function<Once> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& gradient) {
    return gradient.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    TORCH_CHECK(
        false, "tisa.attention: scores made in C++ have no second derivative; ",
        "pass the vector: scoring(queries, keys)");
  }
};

struct Scores : torch::autograd::Function<Scores> {
  using Maybe = const std::optional<Tensor>&;
  struct Rest {
    std::vector<Tensor> parameters;
    c10::intrusive_ptr<Scorer> scorer;
    CUstream stream;
  };

  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe,
      const Rest& rest) {
    std::vector<Tensor> flat;
    for (const auto& parameter : rest.parameters) flat.push_back(parameter.reshape({-1}));
    const Tensor numbers = at::cat(flat);
    auto made = rest.scorer->forward.run(
        {numbers, rest.scorer->table}, numbers.device(), rest.stream);
    // As in Python, where a checkpoint may have gone the other time.
    ctx->save_for_backward({numbers, rest.scorer->table});
    ctx->saved_data["scorer"] = c10::IValue::make_capsule(rest.scorer);
    ctx->set_materialize_grads(false);
    if (made.size() > 1) ctx->mark_non_differentiable({made[1]});
    return made;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list gradients) {
    torch::autograd::variable_list found(MOST_PARAMETERS + 1);
    if (!gradients[0].defined()) return found;
    const auto scorer = c10::static_intrusive_pointer_cast<Scorer>(
        ctx->saved_data["scorer"].toCapsule());
    const Tensor numbers = ctx->get_saved_variables()[0];
    Tensor upstream = gradients[0].contiguous();
    if (!aligned(upstream)) upstream = upstream.clone();
    CUstream stream = nullptr;
    {
      const py::gil_scoped_acquire gil;
      stream = current_stream(upstream.device());
    }
    Tensor sums;
    {
      const at::NoGradGuard guard;
      const auto made = scorer->backward.run(
          {numbers, scorer->table, upstream}, upstream.device(), stream);
      sums = made[0].size(0) == 1 ? made[0][0] : made[0].sum(0);
    }
    if (at::GradMode::is_enabled()) sums = Once::apply(sums.requires_grad_());
    int64_t at = 0;
    for (size_t i = 0; i < scorer->sizes.size(); i++) {
      const auto& sizes = scorer->sizes[i];
      const auto count = c10::multiply_integers(sizes);
      found[i] = sums.narrow(0, at, count).view(sizes);
      at += count;
    }
    return found;
  }
};

// ---- What Python calls.

PyObject* attend(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Six six;
  Key key;
  bool needs = false;
  if (!described(values, count, six, key, needs)) Py_RETURN_NONE;
  const auto at = calls.find(key);
  counts[at != calls.end() ? 0 : 1]++;
  if (at == calls.end() || watched()) Py_RETURN_NONE;
  const Known known = at->second;
  const auto stream = current_stream(six[0].device());
  Tensor output;
  {
    const py::gil_scoped_release released;
    const Tensor seed = drawn_seed(known, six[0]);
    if (needs) {
      const Attention::Rest rest{six[4], six[5], seed, known, stream};
      const auto scores = six[3].defined() ? std::optional<Tensor>(six[3]) : std::nullopt;
      output = Attention::apply(six[0], six[1], six[2], scores, rest);
    } else {
      const at::NoGradGuard guard;
      std::vector<Tensor> seven(six.begin(), six.end());
      seven.push_back(seed);
      output = known->forward.run(ten(seven), six[0].device(), stream)[0];
    }
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

template <class T>
std::vector<T> numbers(const py::handle& sequence) {
  return sequence.cast<std::vector<T>>();
}

// (function, programs, rows, warps, cluster, shared, dependent, cooperative, parameters), a parameter
// being bytes, or (tensor, offset), or that with what a descriptor is made of.
Launch launch_of(const py::tuple& told) {
  Launch launch{
      reinterpret_cast<CUfunction>(told[0].cast<uint64_t>()), told[1].cast<unsigned>(),
      told[2].cast<unsigned>(), told[3].cast<unsigned>(), told[4].cast<unsigned>(),
      told[5].cast<unsigned>(), told[6].cast<bool>(), told[7].cast<bool>(), {}, {}, {}, {}};
  const auto place = [&](size_t size, size_t alignment) {
    const size_t at = (launch.bytes.size() + alignment - 1) / alignment * alignment;
    TORCH_CHECK(at + size <= MOST_BYTES, "tisa: a kernel takes too many parameters");
    launch.bytes.resize(at + size);
    launch.parameters.push_back(at);
    return at;
  };
  for (const auto& value : told[8]) {
    if (PyBytes_Check(value.ptr())) {
      const auto text = value.cast<std::string>();
      const size_t at = place(text.size(), 8);
      std::memcpy(launch.bytes.data() + at, text.data(), text.size());
      continue;
    }
    const auto parts = value.cast<py::tuple>();
    const bool descriptor = parts.size() > 2;
    const Pointer pointer{
        descriptor ? place(sizeof(CUtensorMap), 64) : place(8, 8), parts[0].cast<size_t>(),
        parts[1].cast<uint64_t>()};
    TORCH_CHECK(pointer.tensor < MOST_PLACES, "tisa: a kernel takes too many tensors");
    if (descriptor) {
      launch.descriptors.push_back(
          {pointer, parts[2].cast<int>(), parts[3].cast<int>(), parts[4].cast<int>(),
           numbers<cuuint64_t>(parts[5]), numbers<cuuint64_t>(parts[6]),
           numbers<cuuint32_t>(parts[7])});
    } else {
      launch.pointers.push_back(pointer);
    }
  }
  return launch;
}

// Return a pass: its buffers as tensors that lie as they shall, or None, and its launches.
py::capsule pass_of(const py::list& buffers, const py::list& launches) {
  auto made = std::make_unique<std::shared_ptr<Pass>>(std::make_shared<Pass>());
  for (const auto& buffer : buffers) {
    if (buffer.is_none()) {
      (*made)->buffers.push_back({{0}, {1}, at::kFloat});
    } else {
      const auto like = buffer.cast<Tensor>();
      (*made)->buffers.push_back({like.sizes().vec(), like.strides().vec(), like.scalar_type()});
    }
  }
  for (const auto& launch : launches) {
    (*made)->launches.push_back(launch_of(launch.cast<py::tuple>()));
  }
  return {made.release(), [](void* p) { delete static_cast<std::shared_ptr<Pass>*>(p); }};
}

// Remember a call: its forward pass, how what it saves lies (its seed, if it drops weights), and
// what computes gradients in Python.
bool keep(const py::tuple& given, const py::capsule& pass, const std::vector<Tensor>& saved,
          const py::object& seed, const py::object& slow) {
  Six six;
  Key key;
  bool needs = false;
  if (!described(PySequence_Fast_ITEMS(given.ptr()), Py_ssize_t(given.size()), six, key, needs)) {
    return false;
  }
  if (calls.size() >= MOST_CALLS) calls.clear();
  auto entry = c10::make_intrusive<Entry>();
  entry->forward = **pass.get_pointer<std::shared_ptr<Pass>>();
  std::vector<Tensor> all(saved.begin(), saved.end());
  all.insert(all.end(), six.begin(), six.end());
  all.push_back(seed.is_none() ? Tensor() : seed.cast<Tensor>());
  entry->drops = !seed.is_none();
  entry->saved = layouts(all);
  entry->slow = slow.inc_ref().ptr();
  calls[key] = std::move(entry);
  return true;
}

// Remember a scoring function for calls of one kind.
py::capsule scorer_of(const py::capsule& forward, const py::capsule& backward,
                      const py::object& table, const std::vector<Tensor>& parameters) {
  TORCH_CHECK(parameters.size() <= MOST_PARAMETERS, "tisa: too many parameters");
  auto scorer = c10::make_intrusive<Scorer>();
  scorer->forward = **forward.get_pointer<std::shared_ptr<Pass>>();
  scorer->backward = **backward.get_pointer<std::shared_ptr<Pass>>();
  if (!table.is_none()) scorer->table = table.cast<Tensor>();
  for (const auto& parameter : parameters) scorer->sizes.push_back(parameter.sizes().vec());
  scorer->parameters = layouts(parameters);
  scorer->included = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  using Held = c10::intrusive_ptr<Scorer>;
  return {new Held(std::move(scorer)), [](void* p) { delete static_cast<Held*>(p); }};
}

// Return scores and, if there is one, the band; None where Python has to look.
py::object score(const py::capsule& held, const std::vector<Tensor>& parameters) {
  const auto scorer = *held.get_pointer<c10::intrusive_ptr<Scorer>>();
  if (layouts(parameters) != scorer->parameters || torch::jit::tracer::isTracing() ||
      c10::impl::tls_local_dispatch_key_set().included_.raw_repr() != scorer->included ||
      watched()) {
    return py::none();
  }
  for (const auto& parameter : parameters) {
    // FSDP takes the memory away and leaves the shape.
    if (parameter._fw_grad(0).defined() || parameter.storage().nbytes() == 0) return py::none();
  }
  const Scores::Rest rest{parameters, scorer, current_stream(parameters[0].device())};
  std::array<std::optional<Tensor>, MOST_PARAMETERS> p;
  for (size_t i = 0; i < parameters.size(); i++) p[i] = parameters[i];
  const py::gil_scoped_release released;
  const auto made = Scores::apply(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], rest);
  const py::gil_scoped_acquire gil;
  return py::make_tuple(made[0], made.size() > 1 ? py::cast(made[1]) : py::none());
}

void start(const std::string& library, const py::object& current_stream, const py::object& hooks) {
  void* driver = dlopen(library.c_str(), RTLD_LAZY);
  TORCH_CHECK(driver != nullptr, "tisa: ", library, " cannot be opened");
  const auto function = [&](auto& to, const char* name) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(driver, name));
    TORCH_CHECK(to != nullptr, "tisa: ", library, " has no ", name);
  };
  function(host.launch, "cuLaunchKernelEx");
  function(host.encode, "cuTensorMapEncodeTiled");
  function(host.get_context, "cuCtxGetCurrent");
  function(host.set_context, "cuCtxSetCurrent");
  function(host.retain_context, "cuDevicePrimaryCtxRetain");
  host.current_stream = current_stream.inc_ref().ptr();
  host.hooks = hooks.inc_ref().ptr();
}

PyMethodDef attend_method = {
    "attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL,
    "Return the output of a call that is known, None of another."};

}  // namespace

PYBIND11_MODULE(tisa_native, module) {
  module.def("start", &start);
  module.def("pass_of", &pass_of);
  module.def("keep", &keep);
  module.def("scorer_of", &scorer_of);
  module.def("score", &score);
  module.def("forget", [] { calls.clear(), counts = {}; });
  module.def("counts", [] { return counts; });
  module.attr("attend") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&attend_method, nullptr));
}
