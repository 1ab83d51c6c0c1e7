// Reading of kernel arguments from Python objects.

#include "bind/arguments.h"

#include <algorithm>

namespace ostinato {
namespace {

constexpr const char* DTYPE_NAMES[] = {"float32", "bfloat16", "float16", "int8", "int32", "int64", "float64", "uint8"};

nb::object checked(PyObject* result) {
    if (!result) throw nb::python_error();
    return nb::steal(result);
}

PyObject* kept(const nb::handle& object, const char* name) { return nb::object(object.attr(name)).release().ptr(); }

// Return the module `name` if this process has imported it, without importing it.
nb::object imported(const char* name) {
    return nb::borrow(PyDict_GetItemString(nb::module_::import_("sys").attr("modules").ptr(), name));
}

// numpy's layout of an array, as its "array interface" documents it (`__array_struct__`).
struct ArrayStruct {
    int two, dims;
    char kind;
    int item_bytes, flags;
    Py_intptr_t *shape, *strides;
    void* data;
    PyObject* description;
};

struct Numpy {
    PyTypeObject* array;
    PyObject* struct_name;

    Numpy() {
        array = reinterpret_cast<PyTypeObject*>(kept(nb::module_::import_("numpy"), "ndarray"));
        struct_name = PyUnicode_InternFromString("__array_struct__");
    }
};

const Numpy& numpy() {
    static const Numpy known;
    return known;
}

void refuse_dtype(PyObject* value) {
    const nb::object dtype = nb::handle(value).attr("dtype");
    throw nb::type_error(("kernels know no tensors of " + std::string(nb::str(dtype).c_str())).c_str());
}

// -> the dtype of numpy's kind and size; numpy calls those of ml_dtypes void
int dtype_of(char kind, int bytes) {
    switch (kind * 16 + bytes) {
        case 'f' * 16 + 4: return FLOAT32;
        case 'V' * 16 + 2: return BFLOAT16;
        case 'f' * 16 + 2: return FLOAT16;
        case 'i' * 16 + 1: return INT8;
        case 'i' * 16 + 4: return INT32;
        case 'i' * 16 + 8: return INT64;
        case 'f' * 16 + 8: return FLOAT64;
        case 'u' * 16 + 1: return UINT8;
        default: return -1;
    }
}

void check_dims(Py_ssize_t dims) {
    if (dims > Tensor::MAX_DIMS) throw nb::type_error("a tensor has more dimensions than kernels know");
}

bool read_array(PyObject* value, Tensor& to) {
    const nb::object capsule = checked(PyObject_GetAttr(value, numpy().struct_name));
    const auto* found = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (!found) throw nb::python_error();
    check_dims(found->dims);
    constexpr int NOT_SWAPPED = 0x200;
    const int dtype = found->flags & NOT_SWAPPED ? dtype_of(found->kind, found->item_bytes) : -1;
    if (dtype < 0) refuse_dtype(value);
    to.address = static_cast<std::byte*>(found->data);
    to.dtype = static_cast<DType>(dtype);
    to.dims = found->dims;
    for (int d = 0; d < to.dims; ++d) {
        to.shape[d] = found->shape[d];
        to.strides[d] = found->strides[d] / found->item_bytes;
    }
    return true;
}

// Types and attribute names of torch, kept for the life of the process.
struct Torch {
    PyTypeObject* tensor;
    std::array<PyObject*, 8> dtypes;  // by DType
    PyObject *data_ptr, *stride, *shape, *dtype;

    explicit Torch(const nb::object& torch) {
        tensor = reinterpret_cast<PyTypeObject*>(kept(torch, "Tensor"));
        for (std::size_t i = 0; i < dtypes.size(); ++i) dtypes[i] = kept(torch, DTYPE_NAMES[i]);
        data_ptr = PyUnicode_InternFromString("data_ptr");
        stride = PyUnicode_InternFromString("stride");
        shape = PyUnicode_InternFromString("shape");
        dtype = PyUnicode_InternFromString("dtype");
    }
};

// Return torch's names, or null in a process that has not imported it and so has no tensors of it.
const Torch* torch() {
    static const Torch* known = nullptr;
    if (!known) {
        const nb::object module = imported("torch");
        if (module.is_valid() && nb::hasattr(module, "uint8") && nb::hasattr(module, "Tensor")) known = new Torch(module);
    }
    return known;
}

// Read a tuple of integers into `to`. -> their number
int read_tuple(const nb::object& tuple, std::int64_t (&to)[Tensor::MAX_DIMS]) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple.ptr());
    check_dims(size);
    for (Py_ssize_t i = 0; i < size; ++i) to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
    return static_cast<int>(size);
}

bool read_torch(PyObject* value, Tensor& to) {
    const Torch* known = torch();
    if (!known || !PyType_IsSubtype(Py_TYPE(value), known->tensor)) return false;
    to.address = reinterpret_cast<std::byte*>(
        PyLong_AsUnsignedLongLong(checked(PyObject_CallMethodNoArgs(value, known->data_ptr)).ptr()));
    to.dims = read_tuple(checked(PyObject_GetAttr(value, known->shape)), to.shape);
    read_tuple(checked(PyObject_CallMethodNoArgs(value, known->stride)), to.strides);
    const nb::object dtype = checked(PyObject_GetAttr(value, known->dtype));
    const auto found = std::find(known->dtypes.begin(), known->dtypes.end(), dtype.ptr());
    if (found == known->dtypes.end()) refuse_dtype(value);
    to.dtype = static_cast<DType>(found - known->dtypes.begin());
    return true;
}

}  // namespace

bool read_tensor(PyObject* value, Tensor& to) {
    return PyType_IsSubtype(Py_TYPE(value), numpy().array) ? read_array(value, to) : read_torch(value, to);
}

int thread_count(int named) {
    if (named < 0) throw nb::value_error("threads are 1 or more, or 0 for the library's number");
    if (named > 0) return named;
    if (const nb::object module = imported("torch"); module.is_valid() && nb::hasattr(module, "get_num_threads")) {
        return nb::cast<int>(module.attr("get_num_threads")());
    }
    return nb::cast<int>(nb::module_::import_("ostinato.os_support").attr("usable_cores")());
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
    const auto type = [](int of) { return of < 0 ? "a float" : std::string(DTYPE_NAMES[of]); };
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
