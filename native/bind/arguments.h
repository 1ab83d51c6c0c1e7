// A kernel's arguments by name. A struct says each argument's name, type and layout, once; Python hands over a dict of
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
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "core/simd.h"

namespace ostinato {

namespace nb = nanobind;

// Where a tensor lies: its address, and per dimension its size and its stride in elements.
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

    // What begins at index `i` of the first dimension.
    template <typename T>
    T* row(std::int64_t i) const {
        return at<T>() + i * strides[0];
    }

    std::int64_t element_bytes() const;
};

// What a tensor holds: a DType, or one of these.
enum ElementKind : int {
    ANY = -1,
    FLOATS = -2,   // a storage type (`with_dtype`)
    VALUES = -3,   // the storage type of the kernel: that of all its values, of which the first decides
    WEIGHTS = -4,  // as its values, or 8-bit integers, or bytes of blocks
};

// How it lies.
enum class Layout {
    CONTIGUOUS,
    ROWS,     // with any stride in its first dimension, and contiguous behind it
    VECTORS,  // with any strides but for its last dimension, which is contiguous
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

// A tensor that may be None: then it has no address.
template <typename T>
struct OptionalTensor : T {
    explicit operator bool() const { return this->address != nullptr; }
};

// What the result alone depends on, which Python makes.
struct IgnoredArgument {};

template <typename T>
struct IsOptionalTensor : std::false_type {};
template <typename T>
struct IsOptionalTensor<OptionalTensor<T>> : std::true_type {};

bool read_tensor(PyObject* value, Tensor& to);

// Whether a Python object is such a value, which is put into `to`.
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

// The dict that a kernel was called with.
class Reader {
  public:
    Reader(const char* kernel, PyObject* given) : kernel_(kernel), given_(given) {}

    // The value of that name. TypeError if it is missing, or no T; AssertionError if a tensor holds or lies otherwise.
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

    // AssertionError with `why` if it is not so: a mistake in a layer, not in what a user asked.
    void expect(bool is_so, const std::string& why) const;

    // TypeError if there is a name that was not taken.
    void finish() const {
        if (PyDict_GET_SIZE(given_) != count_) refuse_unknown();
    }

  private:
    static constexpr int MAX_ARGUMENTS = 32;

    const char* kernel_;
    PyObject* given_;
    std::array<PyObject*, MAX_ARGUMENTS> taken_;
    int count_ = 0;
    int values_ = ANY;  // the dtype of the values

    PyObject* take_object(PyObject* name);
    void check(PyObject* name, const Tensor& tensor, int element, Layout layout);
    [[noreturn]] void refuse(PyObject* name, const std::string& why) const;
    [[noreturn]] void refuse_unknown() const;
};

// Says of a cache of keys or values that it holds integers if it has scales, else what the kernel computes in.
inline void check_cache(const Reader& reader, const Tensor& cache, const Tensor& scales, DType dtype) {
    const bool has_scales = scales.address != nullptr;
    reader.expect(cache.dtype == (has_scales ? INT8 : dtype), "a cache is int8 if it has scales, and only then");
}

// What structs of arguments begin with.
struct Arguments {
    Reader* reader;

    Arguments(Reader& reader) : reader(&reader) {}  // NOLINT: a struct of arguments is made of a reader

    // Says what must hold of several arguments together.
    void check(const Reader&) const {}
};

// A member of such a struct, taken from the reader when the struct is made.
#define FIELD(TYPE, NAME)                                                \
    TYPE NAME = reader->take<TYPE>([] {                                  \
        static PyObject* const name = PyUnicode_InternFromString(#NAME); \
        return name;                                                     \
    }())

}  // namespace ostinato
