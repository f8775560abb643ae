/* jansson.h — for `make BARE=1` on a machine without libjansson.a: the functions this program uses,
 * all of which find nothing and write nothing. There are no logs, checkpoints or configurations
 * then, but a preset trains, and kernels can be tested. See dev/bench/gpu/gpu_check.py. */
#ifndef BARE_JANSSON_H
#define BARE_JANSSON_H

#include <stddef.h>
#include <stdio.h>

typedef struct json_t json_t;
typedef long long json_int_t;
typedef struct {
    char text[160];
    int line, column, position;
} json_error_t;

#define JSON_COMPACT 0
#define JSON_INDENT(n) 0
#define JSON_REAL_PRECISION(n) 0
#define JSON_PRESERVE_ORDER 0
#define JSON_REJECT_DUPLICATES 0
#define JSON_DISABLE_EOF_CHECK 0
#define JSON_DECODE_ANY 0
#define JSON_ALLOW_NUL 0
#define JSON_ENCODE_ANY 0
#define JSON_DECODE_INT_AS_REAL 0
#define JSON_SORT_KEYS 0
#define JSON_ENSURE_ASCII 0

#define BARE static inline __attribute__((unused))
BARE json_t *json_pack(const char *format, ...) {
    return (void)format, (json_t *)NULL;
}
BARE json_t *json_object(void) {
    return NULL;
}
BARE json_t *json_array(void) {
    return NULL;
}
BARE json_t *json_null(void) {
    return NULL;
}
BARE json_t *json_true(void) {
    return NULL;
}
BARE json_t *json_boolean(int value) {
    return (void)value, (json_t *)NULL;
}
BARE json_t *json_integer(json_int_t value) {
    return (void)value, (json_t *)NULL;
}
BARE json_t *json_real(double value) {
    return (void)value, (json_t *)NULL;
}
BARE json_t *json_string(const char *value) {
    return (void)value, (json_t *)NULL;
}
BARE json_t *json_loadb(const char *text, size_t bytes, size_t flags, json_error_t *error) {
    (void)text, (void)bytes, (void)flags;
    if (error) {
        const json_error_t none = {"built without Jansson", 0, 0, 0};
        *error = none;
    }
    return NULL;
}
BARE json_t *json_loads(const char *text, size_t flags, json_error_t *error) {
    return json_loadb(text, 0, flags, error);
}
BARE json_t *json_load_file(const char *path, size_t flags, json_error_t *error) {
    return (void)path, (void)flags, (void)error, (json_t *)NULL;
}
BARE char *json_dumps(const json_t *json, size_t flags) {
    return (void)json, (void)flags, (char *)NULL;
}
BARE int json_dumpf(const json_t *json, FILE *file, size_t flags) {
    return (void)json, (void)file, (void)flags, -1;
}
BARE json_t *json_copy(json_t *json) {
    return json;
}
BARE int json_equal(const json_t *one, const json_t *other) {
    return one == other;
}
BARE int json_object_del(json_t *json, const char *key) {
    return (void)json, (void)key, -1;
}
BARE json_t *json_incref(json_t *json) {
    return json;
}
BARE void json_decref(json_t *json) {
    (void)json;
}
BARE json_t *json_object_get(const json_t *json, const char *key) {
    return (void)json, (void)key, (json_t *)NULL;
}
BARE int json_object_set(json_t *json, const char *key, json_t *value) {
    return (void)json, (void)key, (void)value, -1;
}
BARE int json_object_set_new(json_t *json, const char *key, json_t *value) {
    return (void)json, (void)key, (void)value, -1;
}
BARE int json_object_update(json_t *json, json_t *other) {
    return (void)json, (void)other, -1;
}
BARE int json_object_update_new(json_t *json, json_t *other) {
    return (void)json, (void)other, -1;
}
BARE int json_array_append_new(json_t *json, json_t *value) {
    return (void)json, (void)value, -1;
}
BARE json_t *json_array_get(const json_t *json, size_t index) {
    return (void)json, (void)index, (json_t *)NULL;
}
BARE size_t json_object_size(const json_t *json) {
    return (void)json, 0;
}
BARE size_t json_array_size(const json_t *json) {
    return (void)json, 0;
}
BARE json_int_t json_integer_value(const json_t *json) {
    return (void)json, 0;
}
BARE double json_number_value(const json_t *json) {
    return (void)json, 0.0;
}
BARE size_t json_string_length(const json_t *json) {
    return (void)json, (size_t)0;
}
BARE const char *json_string_value(const json_t *json) {
    return (void)json, (const char *)NULL;
}
#define BARE_IS(kind)                                                                              \
    BARE int json_is_##kind(const json_t *json) {                                                  \
        return (void)json, 0;                                                                      \
    }
BARE_IS(array)
BARE_IS(boolean)
BARE_IS(integer)
BARE_IS(null)
BARE_IS(number)
BARE_IS(object)
BARE_IS(string)
BARE_IS(true)
#define json_object_foreach(object, key, value)                                                    \
    for ((void)(object), (key) = NULL, (value) = NULL; (key) && (value);)
#define json_array_foreach(array, index, value)                                                    \
    for ((void)(array), (index) = 0, (value) = NULL; (value); (index)++)

#endif
