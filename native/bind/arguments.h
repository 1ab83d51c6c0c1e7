// Kernel arguments by name. A struct declares each argument's name, type and layout once; Python passes a dict with
// these names.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "core/simd.h"

namespace ostinato {

namespace nb = nanobind;

// Location of a tensor: its address, and per dimension its size and stride in elements.
struct Tensor {
    static constexpr int MAX_DIMS = 4;

    std::byte* address = nullptr;
    DType dtype = FLOAT32;
    int dims = 0;
    std::int64_t shape[MAX_DIMS] = {}, strides[MAX_DIMS] = {};

    template <typename T>
    T* at() const {
        return reinterpret_cast<T*>(address);
    }

    // Return the address of index `i` of the first dimension.
    template <typename T>
    T* row(std::int64_t i) const {
        return at<T>() + i * strides[0];
    }

    std::int64_t element_bytes() const { return DTYPE_BYTES[dtype]; }
};

// Allowed element types of a tensor: a DType, or one of these.
enum ElementKind : int {
    ANY = -1,
    FLOATS = -2,   // any storage type (`with_dtype`)
    VALUES = -3,   // the kernel's storage type: that of its first VALUES tensor
    WEIGHTS = -4,  // as VALUES, or int8, or bytes of blocks
};

// Allowed strides of a tensor.
enum class Layout {
    CONTIGUOUS,
    ROWS,     // any stride in the first dimension, contiguous behind it
    VECTORS,  // any strides but in the last dimension, which is contiguous
};

template <int ELEMENT, Layout LAYOUT>
struct Checked : Tensor {
    static constexpr int element = ELEMENT;
    static constexpr Layout layout = LAYOUT;
};

template <int ELEMENT>
using Array = Checked<ELEMENT, Layout::CONTIGUOUS>;
template <int ELEMENT>
using Strided = Checked<ELEMENT, Layout::ROWS>;
template <int ELEMENT>
using Vectors = Checked<ELEMENT, Layout::VECTORS>;

// A tensor or None, which has no address.
template <typename T>
struct OptionalTensor : T {
    explicit operator bool() const { return this->address != nullptr; }
};

// An argument that only Python reads, to make the result.
struct IgnoredArgument {};

template <typename T>
struct IsOptionalTensor : std::false_type {};
template <typename T>
struct IsOptionalTensor<OptionalTensor<T>> : std::true_type {};

bool read_tensor(PyObject* value, Tensor& to);

// Return the number of threads that a call named. If it named 0: torch's in a process that has imported it, else one
// per usable core.
int thread_count(int named);

// Read a Python object into `to`. -> false if it has another type
template <typename T>
bool from_python(PyObject* value, T& to) {
    if constexpr (std::is_same_v<T, IgnoredArgument>) {
        return true;
    } else if constexpr (IsOptionalTensor<T>::value) {
        return value == Py_None || read_tensor(value, to);
    } else if constexpr (std::is_base_of_v<Tensor, T>) {
        return read_tensor(value, to);
    } else {
        return nb::try_cast<T>(nb::handle(value), to, !std::is_integral_v<T>);
    }
}

// Reader of the dict that a kernel was called with.
class Reader {
  public:
    Reader(const char* kernel, PyObject* given) : kernel_(kernel), given_(given) {}

    // Return the argument `name`. Raise TypeError if it is missing or no T, and AssertionError if a tensor has another
    // type or layout.
    template <typename T>
    T take(PyObject* name) {
        PyObject* value = take_object(name);
        T taken{};
        if (!from_python(value, taken)) refuse(name, std::string("is a ") + Py_TYPE(value)->tp_name);
        if constexpr (std::is_base_of_v<Tensor, T>) {
            if (value != Py_None) check(name, taken, T::element, T::layout);
        }
        return taken;
    }

    // Raise AssertionError with `why` unless `is_so`: the mistake is in a layer, not in a user's request.
    void expect(bool is_so, const std::string& why) const;

    // Raise TypeError if the dict has a name that was not taken.
    void finish() const {
        if (PyDict_GET_SIZE(given_) != count_) refuse_unknown();
    }

  private:
    static constexpr int MAX_ARGUMENTS = 32;

    const char* kernel_;
    PyObject* given_;
    std::array<PyObject*, MAX_ARGUMENTS> taken_;
    int count_ = 0;
    int values_ = ANY;  // dtype of the VALUES tensors

    PyObject* take_object(PyObject* name);
    void check(PyObject* name, const Tensor& tensor, int element, Layout layout);
    [[noreturn]] void refuse(PyObject* name, const std::string& why) const;
    [[noreturn]] void refuse_unknown() const;
};

// Check that a cache of keys or values is int8 if it has scales, and else has the kernel's dtype.
inline void check_cache(const Reader& reader, const Tensor& cache, const Tensor& scales, DType dtype) {
    const bool has_scales = scales.address != nullptr;
    reader.expect(cache.dtype == (has_scales ? INT8 : dtype), "a cache is int8 if it has scales, and only then");
}

// Base of argument structs.
struct Arguments {
    Reader* reader;

    Arguments(Reader& reader) : reader(&reader) {}  // NOLINT: a struct of arguments is made of a reader

    // Check conditions on several arguments together.
    void check(const Reader&) const {}
};

// Declare a member of an argument struct, which is taken from the reader when the struct is made.
#define FIELD(TYPE, NAME)                                                \
    TYPE NAME = reader->take<TYPE>([] {                                  \
        static PyObject* const name = PyUnicode_InternFromString(#NAME); \
        return name;                                                     \
    }())

}  // namespace ostinato
