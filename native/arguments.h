// A kernel's arguments by name. A struct says each argument's name and type, once; Python hands over a dict of these names.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include <nanobind/nanobind.h>

#include "simd.h"

namespace ostinato {

namespace nb = nanobind;

// Where a tensor lies: its address, and per dimension its size and its stride in elements.
struct Tensor {
    static constexpr int MOST_DIMS = 4;

    std::byte* address = nullptr;
    DType dtype = FLOAT32;
    int dims = 0;
    std::int64_t shape[MOST_DIMS] = {}, strides[MOST_DIMS] = {};

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

// A tensor of a storage type of what is computed in float32 (`with_dtype`).
struct Floats : Tensor {};

// A tensor that may be None: then it has no address.
struct MaybeTensor : Tensor {
    explicit operator bool() const { return address != nullptr; }
};

// Each says whether the Python object is such a value, and puts it into `to`.
bool from_python(PyObject* value, Tensor& to);
bool from_python(PyObject* value, Floats& to);
bool from_python(PyObject* value, MaybeTensor& to);

template <typename T>
bool from_python(PyObject* value, T& to) {
    return nb::try_cast<T>(nb::handle(value), to, std::is_floating_point_v<T>);
}

// The dict that a kernel was called with.
class Reader {
  public:
    Reader(const char* kernel, PyObject* given) : kernel_(kernel), given_(given) {}

    // The value of that name. TypeError if it is missing, or no T.
    template <typename T>
    T take(PyObject* name) {
        PyObject* value = take_object(name);
        T taken{};
        if (!from_python(value, taken)) refuse(name, std::string("is a ") + Py_TYPE(value)->tp_name);
        return taken;
    }

    // TypeError if there is a name that was not taken.
    void finish() const {
        if (PyDict_GET_SIZE(given_) != count_) refuse_unknown();
    }

  private:
    static constexpr int MOST = 32;

    const char* kernel_;
    PyObject* given_;
    std::array<PyObject*, MOST> taken_;
    int count_ = 0;

    PyObject* take_object(PyObject* name);
    [[noreturn]] void refuse(PyObject* name, const std::string& why) const;
    [[noreturn]] void refuse_unknown() const;
};

// What structs of arguments begin with.
struct Arguments {
    Reader* reader;

    Arguments(Reader& reader) : reader(&reader) {}  // NOLINT: a struct of arguments is made of a reader
};

// A member of such a struct, taken from the reader when the struct is made.
#define FIELD(TYPE, NAME)                                                \
    TYPE NAME = reader->take<TYPE>([] {                                  \
        static PyObject* const name = PyUnicode_InternFromString(#NAME); \
        return name;                                                     \
    }())

}  // namespace ostinato
