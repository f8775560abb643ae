/* etcd.c — see etcd.h. Requests and answers are JSON, keys and values are base64, and 64-bit
 * numbers are strings: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway. */
#include "llmc/membership/etcd.h"

#include <stdlib.h>

void store_entries_clear(struct store_entries *e) {
    for (int i = 0; i < e->count; i++) {
        free(e->entry[i].key);
        free(e->entry[i].value);
    }
    free(e->entry);
    *e = (struct store_entries){0};
}

#ifndef LLMC_MEET

#include "llmc/log/error.h"

bool etcd_built(void) {
    return false;
}
static int not_built(void) {
    return log_error("this program was built without libcurl and cannot ask etcd");
}
int etcd_open(const char *host, int port, struct store **out) {
    (void)host, (void)port, (void)out;
    return not_built();
}
const char *etcd_local_address(const struct store *store) {
    return (void)store, "";
}
int etcd_watch_open(const char *host, int port, const char *prefix, struct etcd_watch **out) {
    (void)host, (void)port, (void)prefix, (void)out;
    return not_built();
}
enum etcd_watch_result etcd_watch_wait(struct etcd_watch *w, bool listens, double seconds) {
    (void)w, (void)listens, (void)seconds;
    return ETCD_WATCH_ENDED;
}
void etcd_watch_end(struct etcd_watch *w) {
    (void)w;
}
void etcd_watch_close(struct etcd_watch *w) {
    (void)w;
}

#else

#include <curl/curl.h>
#include <dlfcn.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <resolv.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "llmc/log/error.h"
#include "llmc/log/jsonl.h"

enum { TIME_LIMIT = 2000 /* ms */, ANSWER_MOST = 256 << 20 };

/* TCP sends a lost packet again after 0.2 s, then after twice that, and so on; one that opens a
 * connection after 1 s. So a request that takes USUAL_TIMES as long as usual is sent again over
 * another connection, and the first answer counts. */
enum { TRIES = 6 };
static const double AGAIN_LEAST = 0.1 /* s */, USUAL_TIMES = 3;

struct try {
    CURL *curl;
    char *answer;
    size_t bytes, room;
};

struct etcd {
    struct store store; /* first: a store is an etcd */
    CURLM *multi;
    struct try try[TRIES], *answered; /* that of the last request which has an answer, or NULL */
    double usual;                     /* seconds until an answer; more after none has come */
    struct curl_slist *headers;
    char base[300]; /* http://HOST:PORT/v3/ */
    char local[64], error[CURL_ERROR_SIZE];
};

bool etcd_built(void) {
    return true;
}

/* ---- base64 (RFC 4648), by glibc's libresolv ---- */

static json_t *encoded(const char *text) {
    const size_t bytes = strlen(text), room = (bytes + 2) / 3 * 4 + 1;
    char *out = malloc(room);
    if (out) b64_ntop((const unsigned char *)text, bytes, out, room);
    json_t *json = json_string(out);
    free(out);
    return json;
}

/* The decoded text ends with a zero byte; the caller frees it. NULL: not base64, or out of
 * memory. */
static char *decoded(const char *text) {
    const size_t room = text ? strlen(text) / 4 * 3 + 1 : 0;
    unsigned char *out = malloc(room);
    const int bytes = out && text ? b64_pton(text, out, room) : -1;
    if (bytes >= 0) {
        out[bytes] = 0;
        return (char *)out;
    }
    free(out);
    return NULL;
}

/* ---- libcurl ----
 *
 * It is opened when etcd is first asked. It loads thirty libraries more, and few runs need it. */

#define CURL_FUNCTIONS(F)                                                                          \
    F(global_init)                                                                                 \
    F(easy_init)                                                                                   \
    F(easy_setopt)                                                                                 \
    F(easy_getinfo)                                                                                \
    F(easy_strerror)                                                                               \
    F(easy_cleanup)                                                                                \
    F(slist_append)                                                                                \
    F(slist_free_all)                                                                              \
    F(multi_init)                                                                                  \
    F(multi_add_handle)                                                                            \
    F(multi_remove_handle)                                                                         \
    F(multi_perform)                                                                               \
    F(multi_info_read)                                                                             \
    F(multi_poll)                                                                                  \
    F(multi_wakeup)                                                                                \
    F(multi_cleanup)
#define MEMBER(name) __typeof__(curl_##name) *(name);
static struct {
    CURL_FUNCTIONS(MEMBER)
    bool begun;
    char why[200]; /* if it has not begun */
} curl;

#define FIND(name)                                                                                 \
    *(void **)&curl.name = dlsym(library, "curl_" #name);                                          \
    if (!curl.name) {                                                                              \
        snprintf(curl.why, sizeof curl.why, "its libcurl.so.4 has no curl_%s", #name);             \
        return;                                                                                    \
    }

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;
static void begin_curl(void) {
    void *library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(curl.why, sizeof curl.why, "%s", dlerror());
        library = dlopen("libcurl-gnutls.so.4", RTLD_NOW | RTLD_LOCAL); /* Debian has it, too */
    }
    if (!library) return;
    CURL_FUNCTIONS(FIND)
    curl.begun = !curl.global_init(CURL_GLOBAL_DEFAULT);
    if (!curl.begun) snprintf(curl.why, sizeof curl.why, "it cannot be initialised");
}

/* ---- one request ---- */

static size_t take_answer(char *data, size_t size, size_t count, void *user) {
    struct try *t = user;
    const size_t bytes = size * count;
    if (t->bytes + bytes >= t->room) {
        const size_t room = 2 * (t->bytes + bytes) + 1;
        char *answer = room <= ANSWER_MOST ? realloc(t->answer, room) : NULL;
        if (!answer) return 0; /* ends the request */
        t->answer = answer;
        t->room = room;
    }
    memcpy(t->answer + t->bytes, data, bytes);
    t->bytes += bytes;
    return bytes;
}

static enum store_status away(struct etcd *e, const char *what) {
    snprintf(e->store.why, sizeof e->store.why, "%.199s", what);
    return STORE_AWAY;
}

static void begin_try(struct etcd *e, struct try *t, const char *path, const char *body, long ms) {
    char url[400];
    snprintf(url, sizeof url, "%s%s", e->base, path);
    t->bytes = 0;
    curl.easy_setopt(t->curl, CURLOPT_URL, url);
    curl.easy_setopt(t->curl, CURLOPT_HTTPHEADER, e->headers);
    curl.easy_setopt(t->curl, CURLOPT_POSTFIELDS, body);
    curl.easy_setopt(t->curl, CURLOPT_TIMEOUT_MS, ms);
    curl.multi_add_handle(e->multi, t->curl);
}

/* Sends and receives. Returns whether to wait for an answer; *code: of the try that ended last. */
static bool go_on(struct etcd *e, CURLcode *code) {
    int running, left;
    curl.multi_perform(e->multi, &running);
    for (CURLMsg *m; !e->answered && (m = curl.multi_info_read(e->multi, &left));) {
        *code = m->data.result;
        for (int i = 0; i < TRIES && *code == CURLE_OK; i++)
            if (e->try[i].curl == m->easy_handle) e->answered = &e->try[i];
    }
    return running > 0 && !e->answered;
}

static enum store_status transfer(struct etcd *e, const char *path, const char *body) {
    const double again = fmax(AGAIN_LEAST, USUAL_TIMES * e->usual), limit = TIME_LIMIT / 1e3;
    const double began = log_seconds();
    CURLcode code = CURLE_OPERATION_TIMEDOUT;
    int tries = 0;
    e->answered = NULL;
    *e->error = '\0';
    for (double passed = 0;; passed = log_seconds() - began) {
        if (tries < TRIES && passed >= tries * again && passed < limit)
            begin_try(e, &e->try[tries++], path, body, 1 + (long)(1e3 * (limit - passed)));
        if (!go_on(e, &code)) break;
        const double pause = tries < TRIES ? fmin(tries * again - passed, limit) : limit;
        curl.multi_poll(e->multi, NULL, 0, 1 + (int)(1e3 * fmax(pause, 0)), NULL);
    }
    for (int i = 0; i < tries; i++) curl.multi_remove_handle(e->multi, e->try[i].curl);
    if (!e->answered) {
        e->usual = fmin(2 * e->usual + 0.1, limit); /* who is away is soon asked once at a time */
        return away(e, *e->error ? e->error : curl.easy_strerror(code));
    }
    const char *local = NULL;
    double took = limit;
    curl.easy_getinfo(e->answered->curl, CURLINFO_TOTAL_TIME, &took);
    e->usual = fmin(took, 1.25 * e->usual + 0.001);
    if (!curl.easy_getinfo(e->answered->curl, CURLINFO_LOCAL_IP, &local) && local)
        snprintf(e->local, sizeof e->local, "%s", local);
    return STORE_DONE;
}

/* ---- a store with a password ----
 *
 * Its user is root. Who sends the password gets a token, which stands in the header of all requests.
 * A token lapses, and a store that was started again knows none: then the request is refused, and
 * the password is sent again. */

static struct {
    pthread_mutex_t lock; /* the watch has a connection and a thread of its own */
    char text[256];
} token = {PTHREAD_MUTEX_INITIALIZER, ""};

static const char *password_of_store(void) {
    const char *password = getenv("TRAIN_LLAMA2_STORE_PASSWORD");
    return password && *password ? password : NULL;
}

/* Sets the headers of a connection, with the token if there is one. */
static void set_headers(CURL *connection, struct curl_slist **headers) {
    struct curl_slist *list = curl.slist_append(NULL, "Content-Type: application/json");
    char line[300];
    pthread_mutex_lock(&token.lock);
    snprintf(line, sizeof line, "Authorization: %s", token.text);
    if (list && *token.text) curl.slist_append(list, line);
    pthread_mutex_unlock(&token.lock);
    curl.easy_setopt(connection, CURLOPT_HTTPHEADER, list);
    if (*headers) curl.slist_free_all(*headers);
    *headers = list;
}

/* Sends and receives. The caller releases *answer; NULL: none, or no JSON. */
static enum store_status exchange(struct etcd *e, const char *path, const char *body, long *code,
                                  json_t **answer) {
    *answer = NULL;
    const enum store_status status = transfer(e, path, body);
    const struct try *t = e->answered;
    if (status != STORE_DONE) return status;
    curl.easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, code);
    *answer = json_loadb(t->answer ? t->answer : "", t->bytes, 0, NULL);
    return STORE_DONE;
}

/* Sends the password for a token. Returns whether there is one. */
static bool log_in(struct etcd *e) {
    long code;
    json_t *request = json_pack("{s:s, s:s}", "name", "root", "password", password_of_store());
    json_t *answer = NULL;
    char *body = json_dumps(request, JSON_COMPACT);
    json_decref(request);
    if (body) exchange(e, "auth/authenticate", body, &code, &answer);
    free(body);
    const char *text = json_string_value(json_object_get(answer, "token"));
    if (text) {
        pthread_mutex_lock(&token.lock);
        snprintf(token.text, sizeof token.text, "%s", text);
        pthread_mutex_unlock(&token.lock);
        set_headers(e->try[0].curl, &e->headers);
    }
    json_decref(answer);
    return text != NULL;
}

/* ---- requests ---- */

/* Sends `request`, and releases it. The caller releases *answer if the store answered. */
static enum store_status ask(struct etcd *e, const char *path, json_t *request, json_t **answer) {
    char *body = json_dumps(request, JSON_COMPACT);
    json_decref(request);
    *answer = NULL;
    if (!body) return away(e, "out of memory");
    long code = 0;
    enum store_status status = exchange(e, path, body, &code, answer);
    if (status == STORE_DONE && code != 200 && password_of_store() && log_in(e)) {
        json_decref(*answer);
        status = exchange(e, path, body, &code, answer);
    }
    free(body);
    if (status != STORE_DONE) return status;
    if (code == 200 && json_is_object(*answer)) return STORE_DONE;
    const char *said = json_string_value(json_object_get(*answer, "error"));
    if (!said) said = json_string_value(json_object_get(*answer, "message")); /* newer versions */
    char text[200];
    snprintf(text, sizeof text, "HTTP status %ld, %s", code, said ? said : "which is not etcd's");
    json_decref(*answer);
    *answer = NULL;
    return away(e, text);
}

/* 64-bit numbers are strings, and are absent if they are 0. */
static int64_t number(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? strtoll(text, NULL, 10) : 0;
}

static json_t *digits(int64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return json_string(text);
}

/* ---- the store ---- */

static enum store_status take_entries(struct etcd *e, const json_t *list,
                                      struct store_entries *out) {
    size_t i;
    json_t *one;
    out->entry = calloc(json_array_size(list) + 1, sizeof *out->entry);
    if (!out->entry) return away(e, "out of memory");
    json_array_foreach(list, i, one) {
        struct store_entry *entry = &out->entry[out->count++];
        const char *value = json_string_value(json_object_get(one, "value"));
        entry->key = decoded(json_string_value(json_object_get(one, "key")));
        entry->value = decoded(value ? value : "");
        entry->modified = number(one, "mod_revision");
        if (entry->key && entry->value && entry->modified > 0) continue;
        store_entries_clear(out);
        return away(e, "an answer that is not etcd's");
    }
    return STORE_DONE;
}

/* The first key after all that begin with the prefix. */
static json_t *encoded_end(const char *prefix) {
    char end[300];
    snprintf(end, sizeof end, "%s", prefix);
    end[strlen(end) - 1]++;
    return encoded(end);
}

static enum store_status etcd_list(struct store *s, const char *prefix, struct store_entries *out) {
    struct etcd *e = (struct etcd *)s;
    json_t *answer,
        *request = json_pack("{s:o, s:o, s:s, s:s}", "key", encoded(prefix), "range_end",
                             encoded_end(prefix), "sort_order", "ASCEND", "sort_target", "CREATE");
    *out = (struct store_entries){0};
    enum store_status status = ask(e, "kv/range", request, &answer);
    if (status != STORE_DONE) return status;
    status = take_entries(e, json_object_get(answer, "kvs"), out);
    json_decref(answer);
    return status;
}

static json_t *one_write(const struct store_write *write) {
    if (!write->value)
        return json_pack("{s:{s:o}}", "request_delete_range", "key", encoded(write->key));
    return json_pack("{s:{s:o, s:o, s:o}}", "request_put", "key", encoded(write->key), "value",
                     encoded(write->value), "lease", digits(write->lease));
}

/* Whether the guard, which has been changed, has the value that was to be written to it. */
static bool has(const json_t *answer, const char *guard, const struct store_write *write,
                int writes) {
    const json_t *response = json_array_get(json_object_get(answer, "responses"), 0);
    const json_t *found = json_object_get(json_object_get(response, "response_range"), "kvs");
    const char *base64 = json_string_value(json_object_get(json_array_get(found, 0), "value"));
    if (!base64) return false;
    char *value = decoded(base64);
    bool same = false;
    for (int i = 0; i < writes && value; i++)
        same |= !strcmp(write[i].key, guard) && write[i].value && !strcmp(write[i].value, value);
    free(value);
    return same;
}

static enum store_status etcd_commit(struct store *s, const char *guard, int64_t modified,
                                     const struct store_write *write, int writes) {
    json_t *answer, *success = json_array();
    for (int i = 0; i < writes; i++) json_array_append_new(success, one_write(&write[i]));
    json_t *request = json_pack("{s:[{s:o, s:s, s:s, s:o}], s:o, s:[{s:{s:o}}]}", "compare", "key",
                                encoded(guard), "target", "MOD", "result", "EQUAL", "mod_revision",
                                digits(modified), "success", success, "failure", "request_range",
                                "key", encoded(guard));
    const enum store_status status = ask((struct etcd *)s, "kv/txn", request, &answer);
    if (status != STORE_DONE) return status;
    const bool done =
        json_is_true(json_object_get(answer, "succeeded")) || has(answer, guard, write, writes);
    json_decref(answer);
    return done ? STORE_DONE : STORE_CHANGED;
}

static enum store_status etcd_grant(struct store *s, int seconds, int64_t *lease) {
    struct etcd *e = (struct etcd *)s;
    json_t *answer, *request = json_pack("{s:o}", "TTL", digits(seconds));
    const enum store_status status = ask(e, "lease/grant", request, &answer);
    if (status != STORE_DONE) return status;
    *lease = number(answer, "ID");
    json_decref(answer);
    return *lease ? STORE_DONE : away(e, "an answer that is not etcd's");
}

static enum store_status etcd_keep(struct store *s, int64_t lease) {
    json_t *answer, *request = json_pack("{s:o}", "ID", digits(lease));
    const enum store_status status = ask((struct etcd *)s, "lease/keepalive", request, &answer);
    if (status != STORE_DONE) return status;
    const int64_t seconds = number(json_object_get(answer, "result"), "TTL");
    json_decref(answer);
    return seconds > 0 ? STORE_DONE : STORE_CHANGED;
}

static void etcd_close(struct store *s) {
    struct etcd *e = (struct etcd *)s;
    for (int i = 0; i < TRIES; i++) {
        if (e->try[i].curl) curl.easy_cleanup(e->try[i].curl);
        free(e->try[i].answer);
    }
    if (e->multi) curl.multi_cleanup(e->multi);
    if (e->headers) curl.slist_free_all(e->headers);
    free(e);
}

/* Creates a connection with the settings that all have. Returns 0, or -1 after reporting. */
static int new_connection(CURL **connection, struct curl_slist **headers) {
    pthread_once(&curl_once, begin_curl);
    if (!curl.begun) return log_error("--meet needs libcurl (package libcurl4): %s", curl.why);
    *connection = curl.easy_init();
    if (*connection) set_headers(*connection, headers);
    if (!*connection || !*headers) return log_error("libcurl cannot be initialised");
    curl.easy_setopt(*connection, CURLOPT_NOSIGNAL, 1L);
    curl.easy_setopt(*connection, CURLOPT_NOPROXY, "*");
    return 0;
}

static void url_of(const char *host, int port, const char *path, char url[300]) {
    const bool bare = strchr(host, ':') != NULL; /* an IPv6 address */
    snprintf(url, 300, "http://%s%s%s:%d/v3/%s", bare ? "[" : "", host, bare ? "]" : "", port,
             path);
}

int etcd_open(const char *host, int port, struct store **out) {
    *out = NULL;
    struct etcd *e = calloc(1, sizeof *e);
    if (!e) return log_out_of_memory("the connection to etcd", (double)sizeof *e);
    e->store = (struct store){etcd_list, etcd_commit, etcd_grant, etcd_keep, etcd_close, ""};
    url_of(host, port, "", e->base);
    int failed = 0;
    for (int i = 0; i < TRIES && !failed; i++) {
        struct try *t = &e->try[i];
        if ((failed = new_connection(&t->curl, &e->headers))) break;
        curl.easy_setopt(t->curl, CURLOPT_WRITEFUNCTION, take_answer);
        curl.easy_setopt(t->curl, CURLOPT_WRITEDATA, t);
        curl.easy_setopt(t->curl, CURLOPT_ERRORBUFFER, e->error);
    }
    if (!failed && !(e->multi = curl.multi_init()))
        failed = log_error("cannot prepare a connection to etcd");
    if (failed) {
        etcd_close(&e->store);
        return -1;
    }
    *out = &e->store;
    return 0;
}

const char *etcd_local_address(const struct store *store) {
    return ((const struct etcd *)store)->local;
}

/* ---- the watch: etcd reports writes over a connection ----
 *
 * The answer to this request never ends. Its content is ignored: any bytes mean that a key may have
 * been written. */

struct etcd_watch {
    CURLM *multi;
    CURL *curl;
    struct curl_slist *headers;
    char url[300];
    char *request;
    double tried; /* when it connected last */
    bool connected, written;
    atomic_bool ended;
};

static size_t take_word(char *data, size_t size, size_t count, void *user) {
    (void)data;
    ((struct etcd_watch *)user)->written = true;
    return size * count;
}

static void disconnect(struct etcd_watch *w) {
    if (w->connected) curl.multi_remove_handle(w->multi, w->curl);
    w->connected = false;
}

void etcd_watch_close(struct etcd_watch *w) {
    if (!w) return;
    disconnect(w);
    if (w->curl) curl.easy_cleanup(w->curl);
    if (w->multi) curl.multi_cleanup(w->multi);
    if (w->headers) curl.slist_free_all(w->headers);
    free(w->request);
    free(w);
}

static void prepare_watch(struct etcd_watch *w) {
    curl.easy_setopt(w->curl, CURLOPT_URL, w->url);
    curl.easy_setopt(w->curl, CURLOPT_POSTFIELDS, w->request);
    curl.easy_setopt(w->curl, CURLOPT_WRITEFUNCTION, take_word);
    curl.easy_setopt(w->curl, CURLOPT_WRITEDATA, w);
    curl.easy_setopt(w->curl, CURLOPT_FAILONERROR, 1L);
    curl.easy_setopt(w->curl, CURLOPT_CONNECTTIMEOUT_MS, (long)TIME_LIMIT);
    /* So the loss of a store that never closed the connection is noticed, and we connect again. */
    curl.easy_setopt(w->curl, CURLOPT_TCP_KEEPALIVE, 1L);
    curl.easy_setopt(w->curl, CURLOPT_TCP_KEEPIDLE, 5L);
    curl.easy_setopt(w->curl, CURLOPT_TCP_KEEPINTVL, 5L);
}

int etcd_watch_open(const char *host, int port, const char *prefix, struct etcd_watch **out) {
    *out = NULL;
    struct etcd_watch *w = calloc(1, sizeof *w);
    if (!w) return log_out_of_memory("the connection to etcd", (double)sizeof *w);
    json_t *request = json_pack("{s:{s:o, s:o, s:[s]}}", "create_request", "key", encoded(prefix),
                                "range_end", encoded_end(prefix), "filters", "NODELETE");
    w->request = json_dumps(request, JSON_COMPACT);
    json_decref(request);
    url_of(host, port, "watch", w->url);
    w->tried = -1;
    const int failed = new_connection(&w->curl, &w->headers);
    if (!failed) w->multi = curl.multi_init();
    if (!w->multi || !w->request) {
        etcd_watch_close(w);
        return failed ? -1 : log_error("cannot prepare a connection to etcd");
    }
    prepare_watch(w);
    *out = w;
    return 0;
}

static void connect_again(struct etcd_watch *w, double now) {
    if (w->connected || (w->tried >= 0 && now < w->tried + 1)) return;
    w->tried = now;
    set_headers(w->curl, &w->headers);
    w->connected = !curl.multi_add_handle(w->multi, w->curl);
}

enum etcd_watch_result etcd_watch_wait(struct etcd_watch *w, bool listens, double seconds) {
    const double end = log_seconds() + seconds;
    if (listens)
        connect_again(w, log_seconds());
    else
        disconnect(w);
    for (;;) {
        int some;
        if (atomic_load(&w->ended)) return ETCD_WATCH_ENDED;
        curl.multi_perform(w->multi, &some);
        while (curl.multi_info_read(w->multi, &some)) disconnect(w);
        if (w->written) break;
        const double left = end - log_seconds();
        if (left <= 0) return ETCD_WATCH_TIME;
        curl.multi_poll(w->multi, NULL, 0, 1 + (int)(1e3 * left), &some);
    }
    w->written = false;
    return ETCD_WATCH_WRITTEN;
}

void etcd_watch_end(struct etcd_watch *w) {
    atomic_store(&w->ended, true);
    curl.multi_wakeup(w->multi);
}

#endif
