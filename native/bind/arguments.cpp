// Reading of kernel arguments from Python objects.

#include "bind/arguments.h"

#include <algorithm>

namespace ostinato {
namespace {

// Types and attribute names of torch, kept for the life of the process.
struct Torch {
    PyTypeObject* tensor;
    std::array<PyObject*, 8> dtypes;  // by DType
    PyObject *data_ptr, *stride, *shape, *dtype, *get_num_threads;

    Torch() {
        const nb::module_ torch = nb::module_::import_("torch");
        const auto get = [&](const char* name) { return nb::object(torch.attr(name)).release().ptr(); };
        tensor = reinterpret_cast<PyTypeObject*>(get("Tensor"));
        dtypes = {get("float32"), get("bfloat16"), get("float16"), get("int8"),
                  get("int32"),   get("int64"),    get("float64"), get("uint8")};
        get_num_threads = get("get_num_threads");
        data_ptr = PyUnicode_InternFromString("data_ptr");
        stride = PyUnicode_InternFromString("stride");
        shape = PyUnicode_InternFromString("shape");
        dtype = PyUnicode_InternFromString("dtype");
    }
};

const Torch& torch() {
    static const Torch known;
    return known;
}

nb::object checked(PyObject* result) {
    if (!result) throw nb::python_error();
    return nb::steal(result);
}

// Read a tuple of integers into `to`. -> their number
int read_tuple(const nb::object& tuple, std::int64_t (&to)[Tensor::MAX_DIMS]) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple.ptr());
    if (size > Tensor::MAX_DIMS) throw nb::type_error("a tensor has more dimensions than kernels know");
    for (Py_ssize_t i = 0; i < size; ++i) to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
    return static_cast<int>(size);
}

}  // namespace

std::int64_t Tensor::element_bytes() const {
    constexpr std::int64_t BYTES[] = {4, 2, 2, 1, 4, 8, 8, 1};
    return BYTES[dtype];
}

bool read_tensor(PyObject* value, Tensor& to) {
    const Torch& known = torch();
    if (!PyType_IsSubtype(Py_TYPE(value), known.tensor)) return false;
    to.address = reinterpret_cast<std::byte*>(
        PyLong_AsUnsignedLongLong(checked(PyObject_CallMethodNoArgs(value, known.data_ptr)).ptr()));
    to.dims = read_tuple(checked(PyObject_GetAttr(value, known.shape)), to.shape);
    read_tuple(checked(PyObject_CallMethodNoArgs(value, known.stride)), to.strides);
    const nb::object dtype = checked(PyObject_GetAttr(value, known.dtype));
    const auto found = std::find(known.dtypes.begin(), known.dtypes.end(), dtype.ptr());
    if (found == known.dtypes.end()) {
        throw nb::type_error(("kernels know no tensors of " + std::string(nb::str(dtype).c_str())).c_str());
    }
    to.dtype = static_cast<DType>(found - known.dtypes.begin());
    return true;
}

int thread_count(int named) {
    if (named < 0) throw nb::value_error("threads are 1 or more, or 0 for torch's number");
    return named > 0 ? named : static_cast<int>(PyLong_AsLong(checked(PyObject_CallNoArgs(torch().get_num_threads)).ptr()));
}

PyObject* Reader::take_object(PyObject* name) {
    PyObject* value = PyDict_GetItemWithError(given_, name);
    if (!value) {
        if (PyErr_Occurred()) throw nb::python_error();
        refuse(name, "is missing");
    }
    taken_[count_++] = name;
    return value;
}

void Reader::refuse(PyObject* name, const std::string& why) const {
    throw nb::type_error((std::string(kernel_) + ": the argument " + PyUnicode_AsUTF8(name) + " " + why).c_str());
}

void Reader::expect(bool is_so, const std::string& why) const {
    if (is_so) return;
    PyErr_SetString(PyExc_AssertionError, (std::string(kernel_) + ": " + why).c_str());
    throw nb::python_error();
}

void Reader::check(PyObject* name, const Tensor& tensor, int element, Layout layout) {
    const int dtype = tensor.dtype;
    const bool is_float = dtype <= FLOAT16;
    if (element == VALUES && values_ == ANY && is_float) values_ = dtype;
    const int expected = element == VALUES || element == WEIGHTS ? values_
                         : element == FLOATS                     ? (is_float ? dtype : ANY)
                                                                 : element;
    const bool holds = element == ANY || dtype == expected || (element == WEIGHTS && (dtype == INT8 || dtype == UINT8));
    const auto type = [](int of) { return of < 0 ? "a float" : std::string(nb::str(torch().dtypes[of]).c_str()); };
    const std::string of_name = std::string(PyUnicode_AsUTF8(name)) + " is ";
    if (!holds) expect(false, of_name + type(dtype) + " where " + type(expected) + " is read");

    if (std::find(tensor.shape, tensor.shape + tensor.dims, 0) != tensor.shape + tensor.dims) return;
    const int first = layout == Layout::CONTIGUOUS ? 0 : layout == Layout::ROWS ? 1 : tensor.dims - 1;
    std::int64_t stride = 1;
    for (int d = tensor.dims - 1; d >= first && d >= 0; --d) {
        const bool lies = tensor.shape[d] <= 1 || tensor.strides[d] == stride;
        if (!lies) expect(false, of_name + "a strided tensor where a contiguous one is read");
        stride *= tensor.shape[d];
    }
}

void Reader::refuse_unknown() const {
    std::string unknown;
    for (const auto [name, value] : nb::borrow<nb::dict>(given_)) {
        const auto is_name = [&](PyObject* taken) { return nb::handle(taken).equal(name); };
        const bool is_known = std::any_of(taken_.begin(), taken_.begin() + count_, is_name);
        if (!is_known) unknown += std::string(" ") + nb::str(name).c_str();
    }
    throw nb::type_error((std::string(kernel_) + " takes no argument" + unknown).c_str());
}

}  // namespace ostinato
