/* The two extension modules that triton-ascend compiles on a machine with CANN: the driver's `npu_utils`, and one
 * `__triton_launcher` for each kernel. This file has both. Its launcher launches nothing: it appends the line
 * "launch <kernel>" to the file that LAUNCHER_STAND_IN_LOG names. tests/support/planted_cann.py installs it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *launch(PyObject *self, PyObject *arguments) {
    PyObject *metadata = PyTuple_GetItem(arguments, 5); /* after the grid, the stream and the function */
    PyObject *name = metadata ? PyDict_GetItemString(metadata, "kernel_name") : NULL;
    const char *text = name ? PyUnicode_AsUTF8(name) : NULL, *path = getenv("LAUNCHER_STAND_IN_LOG");
    if (text == NULL) return NULL;
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log != NULL) {
        fprintf(log, "launch %s\n", text);
        fclose(log);
    }
    Py_RETURN_NONE;
}

static PyObject *load_kernel_binary(PyObject *self, PyObject *arguments) { return Py_BuildValue("(KKii)", 1, 1, 0, 0); }

static PyObject *get_arch(PyObject *self, PyObject *arguments) {
    const char *chip = getenv("ACL_HOST_SHIM_SOC");
    return PyUnicode_FromString(chip ? chip : "Ascend910B3");
}

static PyObject *get_aicore_num(PyObject *self, PyObject *arguments) { return PyLong_FromLong(20); }

static PyMethodDef launcher_methods[] = {{"launch", launch, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyMethodDef driver_methods[] = {
    {"load_kernel_binary", load_kernel_binary, METH_VARARGS, NULL},
    {"get_arch", get_arch, METH_VARARGS, NULL},
    {"get_aicore_num", get_aicore_num, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef launcher = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, launcher_methods};
static struct PyModuleDef driver = {PyModuleDef_HEAD_INIT, "npu_utils", NULL, -1, driver_methods};

PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&launcher); }
PyMODINIT_FUNC PyInit_npu_utils(void) { return PyModule_Create(&driver); }
