/* safetensors.c — reads and writes safetensors files. See safetensors.h for the format. */
#include "llmc/checkpoint/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "llmc/util/file.h"
#include "llmc/log/error.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors files are little-endian and so must this machine be"
#endif

enum { LENGTH_BYTES = 8 }; /* bytes of the header's length, at the start of the file */

struct safetensors {
    char *path;
    struct file_map map;
    json_t *header; /* owns the names */
    size_t count;
    struct safetensors_view *views; /* in the order of their data */
    struct safetensors_view **by_name;
};

/* ---- opening: everything in the file is checked before it is used ------------------------ */

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
    {"F64", 8},     {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1},
    {"F8_E5M2", 1}, {"I64", 8}, {"I32", 4}, {"I16", 2},  {"I8", 1},
    {"U64", 8},     {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1},
};

/* Size of the type, with *name set to the name in the table above; 0 if the type is unknown. */
static size_t dtype_bytes(const char **name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strcmp(*name, dtypes[i].name) != 0) continue;
        *name = dtypes[i].name;
        return dtypes[i].bytes;
    }
    return 0;
}

/* Reads an array's element as a non-negative integer. Returns false if it is not one. */
static bool element_at(const json_t *array, size_t i, uint64_t *value) {
    const json_t *element = json_array_get(array, i);
    if (!json_is_integer(element) || json_integer_value(element) < 0) return false;
    *value = (uint64_t)json_integer_value(element);
    return true;
}

static int parse_shape(const char *path, const json_t *entry, struct safetensors_view *view) {
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_DIMS)
        return log_error("'%s': the shape of tensor '%s' is no list of at most %d integers", path,
                         view->name, SAFETENSORS_DIMS);
    view->dims = (int)json_array_size(shape);
    view->elements = 1;
    for (int i = 0; i < view->dims; i++) {
        uint64_t size;
        if (!element_at(shape, (size_t)i, &size))
            return log_error("'%s': dimension %d of tensor '%s' is no non-negative integer", path,
                             i, view->name);
        view->shape[i] = (int64_t)size;
        if (__builtin_mul_overflow(view->elements, size, &view->elements))
            return log_error("'%s': the shape of tensor '%s' has more than 2^64 elements", path,
                             view->name);
    }
    return 0;
}

/* Reads one entry of the header. data_bytes: bytes of the file after the header. */
static int parse_entry(const struct safetensors *file, const char *name, const json_t *entry,
                       struct safetensors_view *view) {
    const char *path = file->path;
    view->name = name;
    if (!json_is_object(entry))
        return log_error("'%s': tensor '%s' is described by no JSON object", path, name);
    view->dtype = json_string_value(json_object_get(entry, "dtype"));
    size_t size = view->dtype ? dtype_bytes(&view->dtype) : 0;
    if (size == 0)
        return log_error("'%s': tensor '%s' has the unknown dtype '%.20s'", path, name,
                         view->dtype ? view->dtype : "(none)");
    if (parse_shape(path, entry, view) != 0) return -1;
    if (__builtin_mul_overflow(view->elements, size, &view->bytes))
        return log_error("'%s': tensor '%s' has more than 2^64 bytes", path, name);

    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t begin, end;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !element_at(offsets, 0, &begin) || !element_at(offsets, 1, &end))
        return log_error("'%s': data_offsets of tensor '%s' are no two non-negative integers", path,
                         name);
    const char *data =
        (const char *)view->data; /* set by the caller: the position that offsets count from */
    size_t data_bytes = (size_t)((const char *)file->map.data + file->map.bytes - data);
    if (begin > end || end > data_bytes)
        return log_error("'%s': data_offsets of tensor '%s' are %" PRIu64 " to %" PRIu64
                         ", expected a range within the file's %zu bytes of data; is it truncated?",
                         path, name, begin, end, data_bytes);
    if (end - begin != view->bytes)
        return log_error("'%s': tensor '%s' has %" PRIu64 " bytes, expected %zu from its shape and "
                         "dtype %s",
                         path, name, end - begin, view->bytes, view->dtype);
    view->data = data + begin;
    return 0;
}

static int compare_data(const void *a, const void *b) {
    const struct safetensors_view *x = a, *y = b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q) return p < q ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1; /* empty tensors first */
    return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(struct safetensors_view *const *)a)->name,
                  (*(struct safetensors_view *const *)b)->name);
}

/* Sorted views must follow each other without overlap or gap, from the first byte to the last. */
static int check_cover(const struct safetensors *file, const char *data) {
    const char *end = data;
    for (size_t i = 0; i < file->count; i++) {
        const struct safetensors_view *view = &file->views[i];
        const char *begin = (const char *)view->data;
        if (begin != end)
            return log_error("'%s': tensor '%s' begins at byte %td of the data, expected %td: %s",
                             file->path, view->name, begin - data, end - data,
                             begin < end ? "it overlaps another" : "there is a gap before it");
        end = begin + view->bytes;
    }
    const char *file_end = (const char *)file->map.data + file->map.bytes;
    if (end != file_end)
        return log_error("'%s': %td bytes follow the last tensor, expected none", file->path,
                         file_end - end);
    return 0;
}

/* Reads the header of a mapped file. *data: where its tensors begin. */
static int parse_header(struct safetensors *file, const char **data) {
    uint64_t length;
    const char *start = (const char *)file->map.data;
    if (file->map.bytes < LENGTH_BYTES)
        return log_error("'%s' has %zu bytes, too few for a safetensors file", file->path,
                         file->map.bytes);
    memcpy(&length, start, LENGTH_BYTES);
    if (length > SAFETENSORS_HEADER_BYTES || length > file->map.bytes - LENGTH_BYTES)
        return log_error("'%s': the header's length is %" PRIu64 ", expected at most %d and within "
                         "the file's %zu bytes; is it a safetensors file, and complete?",
                         file->path, length, SAFETENSORS_HEADER_BYTES, file->map.bytes);
    json_error_t error;
    file->header = json_loadb(start + LENGTH_BYTES, (size_t)length, JSON_REJECT_DUPLICATES, &error);
    if (!file->header)
        return log_error("'%s': the header is no JSON: %s (byte %d)", file->path, error.text,
                         error.position);
    if (!json_is_object(file->header))
        return log_error("'%s': the header is no JSON object", file->path);
    *data = start + LENGTH_BYTES + length;
    return 0;
}

static int parse(struct safetensors *file) {
    const char *data;
    if (parse_header(file, &data) != 0) return -1;
    size_t most = json_object_size(file->header);
    file->views = calloc(most + 1, sizeof *file->views);
    file->by_name = calloc(most + 1, sizeof *file->by_name);
    if (!file->views || !file->by_name)
        return log_error("'%s': out of memory for %zu tensors", file->path, most);
    const char *name;
    json_t *entry;
    json_object_foreach(file->header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        struct safetensors_view *view = &file->views[file->count];
        view->data = data;
        if (parse_entry(file, name, entry, view) != 0) return -1;
        file->count++;
    }
    qsort(file->views, file->count, sizeof *file->views, compare_data);
    for (size_t i = 0; i < file->count; i++) file->by_name[i] = &file->views[i];
    qsort(file->by_name, file->count, sizeof *file->by_name, compare_names);
    return check_cover(file, data);
}

int safetensors_open(const char *path, struct safetensors **out) {
    struct safetensors *file = calloc(1, sizeof *file);
    *out = NULL;
    if (file) file->path = strdup(path);
    if (!file || !file->path) {
        log_error("cannot open '%s': out of memory", path);
    } else if (!file_map(path, &file->map) && !parse(file) && !file_is_lost(&file->map)) {
        *out = file;
        return 0;
    }
    safetensors_close(file);
    return -1;
}

void safetensors_close(struct safetensors *file) {
    if (!file) return;
    free(file->by_name);
    free(file->views);
    json_decref(file->header);
    file_unmap(&file->map);
    free(file->path);
    free(file);
}

/* ---- reading ---------------------------------------------------------------------------- */

size_t safetensors_count(const struct safetensors *file) {
    return file->count;
}

const struct safetensors_view *safetensors_at(const struct safetensors *file, size_t i) {
    return &file->views[i];
}

const struct safetensors_view *safetensors_find(const struct safetensors *file, const char *name) {
    struct safetensors_view key = {0}, *pointer = &key;
    key.name = name;
    struct safetensors_view **found = (struct safetensors_view **)bsearch(
        &pointer, file->by_name, file->count, sizeof *file->by_name, compare_names);
    return found ? *found : NULL;
}

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Converts IEEE 754 binary16, exactly, and independently of the processor's flush-to-zero mode.
 * All cases are computed and one is chosen, so that the compiler can turn a loop into vector
 * instructions. */
static inline float float_of_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7FFF) << 13;
    uint32_t normal = rest + (112u << 23), special = rest | 0x7F800000; /* infinity, NaN */
    float fraction = (float)(half & 1023) * 0x1p-24f;                   /* below the normal range */
    uint32_t small;
    memcpy(&small, &fraction, sizeof small);
    uint32_t exponent = half & 0x7C00;
    return float_of_bits(sign | (exponent == 0 ? small : exponent == 0x7C00 ? special : normal));
}

/* Two bytes at a time, in any alignment. */
struct unaligned_u16 {
    uint16_t value;
} __attribute__((packed, may_alias));

static void convert_float(float *__restrict__ out, const void *__restrict__ data, size_t count) {
    memcpy(out, data, count * sizeof *out);
}

static void convert_bfloat16(float *__restrict__ out, const void *__restrict__ data, size_t count) {
    const struct unaligned_u16 *in = data;
    for (size_t i = 0; i < count; i++) out[i] = float_of_bits((uint32_t)in[i].value << 16);
}

static void convert_half(float *__restrict__ out, const void *__restrict__ data, size_t count) {
    const struct unaligned_u16 *in = data;
    for (size_t i = 0; i < count; i++) out[i] = float_of_half(in[i].value);
}

/* Lets the kernel map a part of the file at once, because a page fault for every few pages costs
 * as much as the copy. Kernels before 5.14 do not support this, and take the page faults. */
static void populate(const void *data, size_t bytes) {
#ifdef MADV_POPULATE_READ
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)data / page * page;
    madvise((void *)first, (uintptr_t)data + bytes - first, MADV_POPULATE_READ);
#else
    (void)data, (void)bytes;
#endif
}

/* Converts in pieces, so that many threads read the file at once. */
static void convert(void (*one)(float *, const void *, size_t), float *out, const void *data,
                    size_t count, size_t size) {
    enum { PIECE = 1 << 19 };
    int64_t pieces = (int64_t)((count + PIECE - 1) / PIECE);
#pragma omp parallel for schedule(dynamic) if (pieces > 1)
    for (int64_t i = 0; i < pieces; i++) {
        size_t start = (size_t)i * PIECE, n = count - start < PIECE ? count - start : PIECE;
        const char *from = (const char *)data + start * size;
        populate(from, n * size);
        one(out + start, from, n);
    }
}

/* "(2, 3)" for reports */
static const char *shape_text(char text[200], const int64_t *shape, int dims) {
    int length = snprintf(text, 200, "(");
    for (int i = 0; i < dims; i++)
        length +=
            snprintf(text + length, 200 - (size_t)length, "%s%" PRId64, i ? ", " : "", shape[i]);
    snprintf(text + length, 200 - (size_t)length, ")");
    return text;
}

/* Exponents of infinity and NaN are all ones. */
static size_t first_not_finite(const float *x, size_t count) {
    size_t first = count;
#pragma omp parallel for reduction(min : first) if (count > 1 << 19)
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        if ((bits & 0x7f800000) == 0x7f800000 && i < first) first = i;
    }
    return first;
}

int safetensors_copy_float(const struct safetensors *file, const char *name, const int64_t *shape,
                           int dims, float *out) {
    const struct safetensors_view *view = safetensors_find(file, name);
    if (!view)
        return log_error("'%s' has no tensor '%s' (it has %zu others)", file->path, name,
                         file->count);
    bool same = view->dims == dims;
    for (int i = 0; same && i < dims; i++) same = view->shape[i] == shape[i];
    if (!same) {
        char found[200], expected[200];
        return log_error("'%s': tensor '%s' has shape %s, expected %s", file->path, name,
                         shape_text(found, view->shape, view->dims),
                         shape_text(expected, shape, dims));
    }
    if (strcmp(view->dtype, "F32") == 0)
        convert(convert_float, out, view->data, view->elements, 4);
    else if (strcmp(view->dtype, "BF16") == 0)
        convert(convert_bfloat16, out, view->data, view->elements, 2);
    else if (strcmp(view->dtype, "F16") == 0)
        convert(convert_half, out, view->data, view->elements, 2);
    else
        return log_error("'%s': tensor '%s' has dtype %s, expected F32, BF16 or F16", file->path,
                         name, view->dtype);
    if (file_is_lost(&file->map)) return -1;
    const size_t first = first_not_finite(out, view->elements);
    if (first == view->elements) return 0;
    return log_error("'%s': tensor '%s' is %g in element %zu: expected finite numbers, so another "
                     "checkpoint",
                     file->path, name, (double)out[first], first);
}

bool safetensors_is_lost(const struct safetensors *file) {
    return file_is_lost(&file->map);
}

/* ---- writing ---------------------------------------------------------------------------- */

static const char *dtype_of(const struct safetensors_tensor *tensor) {
    return tensor->dtype ? tensor->dtype : "F32";
}

static size_t tensor_bytes(const struct safetensors_tensor *tensor) {
    const char *dtype = dtype_of(tensor);
    size_t bytes = dtype_bytes(&dtype);
    for (int i = 0; i < tensor->dims; i++) bytes *= (size_t)tensor->shape[i];
    return bytes;
}

/* {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]} */
static json_t *entry_to_json(const struct safetensors_tensor *tensor, size_t begin) {
    json_t *shape = json_array();
    for (int i = 0; i < tensor->dims; i++)
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_of(tensor), "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)(begin + tensor_bytes(tensor)));
}

/* The header's text, allocated with malloc; NULL if out of memory, or if a name is not UTF-8. */
static char *header_text(const struct safetensors_tensor *tensors, size_t count,
                         const char *format) {
    json_t *root =
        format ? json_pack("{s:{s:s}}", "__metadata__", "format", format) : json_object();
    bool failed = !root;
    size_t begin = 0;
    for (size_t i = 0; i < count && !failed; i++) {
        failed = json_object_set_new(root, tensors[i].name, entry_to_json(&tensors[i], begin)) != 0;
        begin += tensor_bytes(&tensors[i]);
    }
    char *text = failed ? NULL : json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

int safetensors_write(const char *path, const struct safetensors_tensor *tensors, size_t count,
                      const char *format) {
    char *text = header_text(tensors, count, format);
    if (!text) return log_error("cannot write '%s': out of memory for its header", path);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8; /* the data starts aligned */
    const int descriptor = file_create(path);
    int status = descriptor < 0 ? -1 : file_write(descriptor, &padded, LENGTH_BYTES, path);
    if (status == 0) status = file_write(descriptor, text, (size_t)length, path);
    if (status == 0) status = file_write(descriptor, "       ", (size_t)(padded - length), path);
    for (size_t i = 0; i < count && status == 0; i++)
        status = file_write(descriptor, tensors[i].data, tensor_bytes(&tensors[i]), path);
    if (descriptor >= 0 && file_finish(descriptor, path) != 0) status = -1;
    free(text);
    return status;
}
