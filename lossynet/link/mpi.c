/* mpi.c — the link over MPI, which is reliable: the baseline, and the deterministic test harness.
 *
 * A datagram is sent by one MPI_Isend from a slot. There are more slots than the transport's
 * windows allow datagrams on their way, so that a slot is always free soon. MPI keeps the order
 * between two ranks. It makes progress only within its calls, so the transport's loop must run
 * until everything has arrived.
 */
#include "lossynet/link/link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    WINDOWS_BYTES = 16 * 1024 * 1024, /* the windows of all peers together */
    WINDOW_MOST = 256,
    WINDOW_LEAST = 8,
    CONTROL = 80, /* slots per peer for other datagrams: messages (64), state, ends of phases */
};

static int window(int ranks, size_t payload_bytes) {
    size_t datagrams = WINDOWS_BYTES / ((size_t)(ranks - 1) * (payload_bytes + WIRE_HEADER_BYTES));
    return datagrams < WINDOW_LEAST  ? WINDOW_LEAST
           : datagrams > WINDOW_MOST ? WINDOW_MOST
                                     : (int)datagrams;
}

static size_t slot_bytes(size_t payload_bytes) {
    return (WIRE_HEADER_BYTES + payload_bytes + 63) / 64 * 64;
}

static size_t slots(int ranks, size_t payload_bytes) {
    return (size_t)(ranks - 1) * (size_t)(window(ranks, payload_bytes) + CONTROL);
}

size_t ln_link_mpi_memory(int ranks, size_t payload_bytes) {
    return (slots(ranks, payload_bytes) + LOSSYNET_BATCH) * slot_bytes(payload_bytes);
}

#ifdef LOSSYNET_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

static const double CLOSING = 5; /* longest wait for the last messages, in seconds */

/* A waiting rank looks LOOKS times in vain, and sleeps before each later look, the longer the more
 * it has looked. It does not yield the processor instead: where ranks share cores with others, one
 * that yields takes its share of the time all the same, and whom it waits for gets less. */
enum { LOOKS = 20, PAUSE_NS = 200, PAUSE_MOST_NS = 1000 * 1000 };

struct link_mpi {
    struct ln_link link; /* first: a link is its address */
    struct lossynet_world world;
    MPI_Comm comm;
    size_t capacity; /* of a slot */
    int slots, free_slots;
    int looks;            /* in vain, since a message came or left */
    bool failed;          /* a call of MPI has; one line was logged */
    int *free_slot;       /* [slots]: a stack of the slots that can be filled */
    int *done;            /* [slots], for MPI_Testsome */
    MPI_Request *request; /* [slots] */
    uint8_t *outgoing;    /* [slots][capacity] */
    uint8_t *incoming;    /* [LOSSYNET_BATCH][capacity] */
};

/* Logs the text of the first MPI error. peer -1: MPI does not say which. */
static lossynet_status failed(struct link_mpi *mpi, const char *call, int peer, int code) {
    char text[MPI_MAX_ERROR_STRING] = "", whom[32] = "";
    int length;
    if (mpi->failed) return LOSSYNET_LINK;
    mpi->failed = true;
    if (peer >= 0) snprintf(whom, sizeof whom, ", peer rank %d", peer);
    MPI_Error_string(code, text, &length);
    return ln_fail(LOSSYNET_LINK, "rank %d%s: %s: %s", mpi->world.rank, whom, call, text);
}

/* Finds the slots whose datagrams have left. */
static void reap(struct link_mpi *mpi) {
    int count = 0;
    if (mpi->free_slots == mpi->slots) return;
    const int code = MPI_Testsome(mpi->slots, mpi->request, &count, mpi->done, MPI_STATUSES_IGNORE);
    if (code) failed(mpi, "MPI_Testsome", -1, code);
    for (int i = 0; !code && count != MPI_UNDEFINED && i < count; i++)
        mpi->free_slot[mpi->free_slots++] = mpi->done[i];
    if (count > 0) mpi->looks = 0;
}

static void link_wait(struct ln_link *link, double seconds) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    (void)seconds;
    if (mpi->looks * PAUSE_NS < PAUSE_MOST_NS) mpi->looks++;
    if (mpi->looks > LOOKS) nanosleep(&(struct timespec){0, mpi->looks * PAUSE_NS}, NULL);
}

static lossynet_status link_send(struct ln_link *link, int peer, const struct ln_datagram *batch,
                                 int count) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    for (int i = 0; i < count; i++) {
        while (mpi->free_slots == 0 && !mpi->failed) {
            reap(mpi);
            if (mpi->free_slots == 0) link_wait(link, 0);
        }
        if (mpi->failed) return LOSSYNET_LINK;
        int slot = mpi->free_slot[--mpi->free_slots];
        uint8_t *bytes = mpi->outgoing + (size_t)slot * mpi->capacity;
        memcpy(bytes, batch[i].header, WIRE_HEADER_BYTES);
        if (batch[i].length) memcpy(bytes + WIRE_HEADER_BYTES, batch[i].payload, batch[i].length);
        int code = MPI_Isend(bytes, (int)(WIRE_HEADER_BYTES + batch[i].length), MPI_BYTE, peer, 0,
                             mpi->comm, &mpi->request[slot]);
        if (code) return failed(mpi, "MPI_Isend", peer, code);
    }
    return LOSSYNET_OK;
}

/* Begins to receive the messages that are there, and waits until they are whole: MPI asks the
 * sender of a large one for its contents. */
static int link_receive(struct ln_link *link, struct ln_arrival *arrivals) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    MPI_Request request[LOSSYNET_BATCH];
    int n = 0, code = 0;
    reap(mpi);
    while (n < LOSSYNET_BATCH && !mpi->failed) {
        MPI_Message message;
        MPI_Status status;
        int there = 0, bytes = 0;
        code = MPI_Improbe(MPI_ANY_SOURCE, 0, mpi->comm, &there, &message, &status);
        if (code) failed(mpi, "MPI_Improbe", -1, code);
        if (code || !there) break;
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        uint8_t *to = mpi->incoming + (size_t)n * mpi->capacity;
        code = MPI_Imrecv(to, (int)mpi->capacity, MPI_BYTE, &message, &request[n]);
        if (code) {
            failed(mpi, "MPI_Imrecv", status.MPI_SOURCE, code);
            break;
        }
        arrivals[n++] =
            (struct ln_arrival){.bytes = to, .count = (size_t)bytes, .peer = status.MPI_SOURCE};
    }
    if (n) mpi->looks = 0;
    for (int whole = n == 0; !whole && !mpi->failed;) {
        code = MPI_Testall(n, request, &whole, MPI_STATUSES_IGNORE);
        if (code) failed(mpi, "MPI_Testall", arrivals[0].peer, code);
        if (!whole) link_wait(link, 0);
    }
    return mpi->failed ? -1 : n;
}

/* Receives all messages that are still on their way, because a slot may be freed only when its
 * message was received, even if no rank needs it. A rank that has failed never takes part in the
 * barrier, so the others give up after CLOSING. */
static void drain(struct link_mpi *mpi) {
    struct ln_arrival unwanted[LOSSYNET_BATCH];
    MPI_Request barrier = MPI_REQUEST_NULL;
    double end = MPI_Wtime() + CLOSING;
    for (int together = 0; !together && !mpi->failed && MPI_Wtime() < end;
         link_wait(&mpi->link, 0)) {
        link_receive(&mpi->link, unwanted);
        if (mpi->free_slots < mpi->slots) continue;
        if (barrier == MPI_REQUEST_NULL) MPI_Ibarrier(mpi->comm, &barrier);
        MPI_Test(&barrier, &together, MPI_STATUS_IGNORE);
    }
}

static void link_close(struct ln_link *link) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    if (mpi->comm != MPI_COMM_NULL) {
        drain(mpi);
        MPI_Comm_free(&mpi->comm);
    }
    free(mpi->incoming);
    free(mpi->outgoing);
    free(mpi->request);
    free(mpi->done);
    free(mpi->free_slot);
    free(mpi);
}

static bool take_slots(struct link_mpi *mpi) {
    size_t n = (size_t)mpi->slots;
    mpi->free_slot = ln_memory_take(n, sizeof *mpi->free_slot);
    mpi->done = ln_memory_take(n, sizeof *mpi->done);
    mpi->request = ln_memory_take(n, sizeof *mpi->request);
    mpi->outgoing = ln_memory_take(n, mpi->capacity);
    mpi->incoming = ln_memory_take(LOSSYNET_BATCH, mpi->capacity);
    if (!mpi->free_slot || !mpi->done || !mpi->request || !mpi->outgoing || !mpi->incoming)
        return false;
    for (int i = 0; i < mpi->slots; i++) {
        mpi->request[i] = MPI_REQUEST_NULL;
        mpi->free_slot[mpi->free_slots++] = i;
    }
    return true;
}

lossynet_status ln_link_mpi_open(const struct ln_link_settings *settings, struct ln_link **out) {
    *out = NULL;
    int ranks = settings->world.ranks, started = 0;
    size_t payload = settings->payload_bytes ? settings->payload_bytes : LOSSYNET_PAYLOAD_DEFAULT;
    size_t most = payload > LOSSYNET_PAYLOAD_DEFAULT ? payload : LOSSYNET_PAYLOAD_DEFAULT;
    MPI_Initialized(&started);
    if (!started)
        return ln_fail(LOSSYNET_LINK, "%d ranks without MPI: expected lossynet_bootstrap first",
                       ranks);
    struct link_mpi *mpi = ln_memory_take(1, sizeof *mpi);
    if (!mpi) goto no_memory;
    mpi->world = settings->world;
    mpi->comm = MPI_COMM_NULL;
    mpi->capacity = slot_bytes(most);
    mpi->slots = (int)slots(ranks, most);
    mpi->link = (struct ln_link){
        .name = "mpi",
        .features.reliable = true,
        .features.payload_most = most,
        .features.receive_queue = 2 * (ranks - 1) * window(ranks, most),
        .memory_bytes = ln_link_mpi_memory(ranks, most),
        .send = link_send,
        .receive = link_receive,
        .wait = link_wait,
        .close = link_close,
    };
    if (!take_slots(mpi)) goto close_link;
    int code = MPI_Comm_dup(MPI_COMM_WORLD, &mpi->comm);
    if (code) {
        lossynet_status status = failed(mpi, "MPI_Comm_dup", -1, code);
        link_close(&mpi->link);
        return status;
    }
    MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN);
    *out = &mpi->link;
    return LOSSYNET_OK;
close_link:
    link_close(&mpi->link);
no_memory:
    return ln_fail(LOSSYNET_NO_MEMORY, "rank %d: no memory for the datagrams of %d ranks",
                   settings->world.rank, ranks);
}

#else

lossynet_status ln_link_mpi_open(const struct ln_link_settings *settings, struct ln_link **out) {
    (void)settings; /* without MPI the ranks could not even start together */
    *out = NULL;
    return LOSSYNET_LINK;
}

#endif
