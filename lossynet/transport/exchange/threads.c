/* threads.c — lets in one thread at a time: a caller, or the transport's own thread (progress.c),
 * which gives way to callers.
 */
#include "lossynet/transport/exchange/exchange.h"

void ln_threads_enter(struct ln_transport *t) {
    struct ln_threads *threads = &t->threads;
    if (threads->threaded) {
        __atomic_add_fetch(&threads->wanted, 1, __ATOMIC_SEQ_CST);
        t->link->wake(t->link);
        pthread_mutex_lock(&threads->lock);
    }
    threads->log_before = ln_log_use(&threads->log);
}

void ln_threads_leave(struct ln_transport *t) {
    struct ln_threads *threads = &t->threads;
    ln_log_use(threads->log_before);
    if (!threads->threaded) return;
    __atomic_sub_fetch(&threads->wanted, 1, __ATOMIC_SEQ_CST);
    pthread_cond_signal(&threads->handed_back);
    pthread_mutex_unlock(&threads->lock);
}
