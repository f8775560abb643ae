/* link_mpi.c — datagrams over MPI: a reliable carrier, the baseline and the deterministic harness.
 *
 * Datagrams for one rank are packed, one after the other, into a train of about 256 KiB that leaves
 * by MPI_Isend. Each peer has two trains: one is filled while the other is on its way. Whoever has
 * to wait for a train receives meanwhile, so that two ranks which send to each other never block.
 *
 * A phase has a tag of its own, and MPI matches by tag: when a fast rank is one phase ahead, its
 * trains wait within MPI until this rank opens that phase. (Important where the vectors being
 * reduced are the parameters themselves: they must not change underneath.) A rank is never two
 * phases ahead, since no phase ends without a DONE from everybody.
 */
#include "lossynet/internal.h"

#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum {
    TRAIN_BYTES = 256 * 1024,
    TRAINS_BYTES = 64 * 1024 * 1024, /* of all peers together, so that many peers get short ones */
    TAGS = 1024,
};

static size_t train_capacity(int ranks, size_t packet_bytes) {
    size_t capacity = TRAIN_BYTES, share = TRAINS_BYTES / (2 * (size_t)ranks);
    if (capacity > share) capacity = share;
    if (capacity < packet_bytes + WIRE_HEADER_BYTES) capacity = packet_bytes + WIRE_HEADER_BYTES;
    return (capacity + 63) / 64 * 64;
}

size_t lossynet_link_mpi_memory(int ranks, size_t packet_bytes) {
    return (2 * (size_t)(ranks - 1) + 1) * train_capacity(ranks, packet_bytes);
}

#ifdef LOSSYNET_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

struct train {
    uint8_t *bytes; /* NULL for the rank itself */
    size_t used;
    MPI_Request request;
};

struct link_mpi {
    struct lossynet_link link; /* first: a link is its address */
    struct lossynet_link_settings settings;
    MPI_Comm comm;
    int tag;
    uint64_t phases; /* begun so far */
    uint64_t step;   /* for messages */
    size_t capacity;
    struct train (*train)[2]; /* [ranks] */
    int *filling;             /* [ranks]: which of the two */
    uint8_t *memory;          /* of all trains */
    uint8_t *incoming;        /* [capacity] */
    int *counts, *starts;     /* [ranks], for MPI_Allgatherv */
};

/* Logs what MPI says; peer -1: all. */
static lossynet_status failed(const struct link_mpi *mpi, const char *call, int peer, int code) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(code, text, &length);
    if (peer >= 0)
        lossynet_log("rank %d, step %" PRIu64 ", peer rank %d: %s: %s", mpi->settings.world.rank,
                     mpi->step, peer, call, text);
    else
        lossynet_log("rank %d, step %" PRIu64 ", all ranks: %s: %s", mpi->settings.world.rank,
                     mpi->step, call, text);
    return LOSSYNET_LINK;
}

/* ---- receiving ---- */

static void deliver(struct link_mpi *mpi, int peer, const uint8_t *train, size_t bytes) {
    while (bytes > 0) {
        size_t first = wire_datagram_bytes(train, bytes);
        mpi->settings.receive(mpi->settings.context, peer, train, first);
        train += first;
        bytes -= first;
    }
}

/* Receives one train if there is one. */
static lossynet_status receive_one(struct link_mpi *mpi, bool *received) {
    MPI_Status status;
    int there = 0, bytes = 0;
    *received = false;
    int code = MPI_Iprobe(MPI_ANY_SOURCE, mpi->tag, mpi->comm, &there, &status);
    if (code) return failed(mpi, "MPI_Iprobe", -1, code);
    if (!there) return LOSSYNET_OK;
    int peer = status.MPI_SOURCE;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (bytes < 0 || (size_t)bytes > mpi->capacity) {
        lossynet_log("rank %d, step %" PRIu64 ", peer rank %d: a train of %d bytes: expected at "
                     "most %zu",
                     mpi->settings.world.rank, mpi->step, peer, bytes, mpi->capacity);
        return LOSSYNET_PROTOCOL;
    }
    code = MPI_Recv(mpi->incoming, bytes, MPI_BYTE, peer, mpi->tag, mpi->comm, &status);
    if (code) return failed(mpi, "MPI_Recv", peer, code);
    deliver(mpi, peer, mpi->incoming, (size_t)bytes);
    *received = true;
    return LOSSYNET_OK;
}

static lossynet_status link_progress(struct lossynet_link *link) {
    bool received;
    lossynet_status status = receive_one((struct link_mpi *)link, &received);
    if (!received) sched_yield(); /* ranks may share cores */
    return status;
}

/* ---- sending ---- */

/* Returns when the train has left and can be filled again; receives meanwhile. */
static lossynet_status train_wait(struct link_mpi *mpi, int peer, struct train *train) {
    for (;;) {
        int done;
        int code = MPI_Test(&train->request, &done, MPI_STATUS_IGNORE);
        if (code) return failed(mpi, "MPI_Isend", peer, code);
        if (done) break;
        lossynet_status status = link_progress(&mpi->link);
        if (status) return status;
    }
    train->used = 0;
    return LOSSYNET_OK;
}

static lossynet_status train_dispatch(struct link_mpi *mpi, int peer) {
    struct train *train = &mpi->train[peer][mpi->filling[peer]];
    if (train->used == 0) return LOSSYNET_OK;
    int code = MPI_Isend(train->bytes, (int)train->used, MPI_BYTE, peer, mpi->tag, mpi->comm,
                         &train->request);
    if (code) return failed(mpi, "MPI_Isend", peer, code);
    mpi->filling[peer] ^= 1;
    return train_wait(mpi, peer, &mpi->train[peer][mpi->filling[peer]]);
}

static lossynet_status link_send(struct lossynet_link *link, int peer,
                                 const struct lossynet_datagram *batch, int count) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    for (int i = 0; i < count; i++) {
        size_t bytes = WIRE_HEADER_BYTES + batch[i].length;
        if (mpi->train[peer][mpi->filling[peer]].used + bytes > mpi->capacity) {
            lossynet_status status = train_dispatch(mpi, peer);
            if (status) return status;
        }
        struct train *train = &mpi->train[peer][mpi->filling[peer]];
        memcpy(train->bytes + train->used, batch[i].header, WIRE_HEADER_BYTES);
        if (batch[i].length)
            memcpy(train->bytes + train->used + WIRE_HEADER_BYTES, batch[i].payload,
                   batch[i].length);
        train->used += bytes;
    }
    return LOSSYNET_OK;
}

static lossynet_status link_flush(struct lossynet_link *link) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    for (int distance = 1; distance < mpi->settings.world.ranks; distance++) {
        int peer = (mpi->settings.world.rank + distance) % mpi->settings.world.ranks;
        lossynet_status status = train_dispatch(mpi, peer);
        if (status) return status;
    }
    return LOSSYNET_OK;
}

/* ---- phases ---- */

static lossynet_status link_begin(struct lossynet_link *link, lossynet_phase phase, uint64_t step) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    mpi->step = step;
    /* Phases are counted, not taken from the step, so that two phases in a row never share a tag
     * whatever an algorithm does in a step. */
    mpi->tag = (int)(mpi->phases++ % TAGS) * 2 + (int)phase;
    return LOSSYNET_OK;
}

/* Large messages only move while their sender is within MPI, and it may be about to compute for a
 * long time: all trains must have left. */
static lossynet_status link_end(struct lossynet_link *link) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    for (int peer = 0; peer < mpi->settings.world.ranks; peer++) {
        for (int i = 0; i < 2; i++) {
            lossynet_status status = train_wait(mpi, peer, &mpi->train[peer][i]);
            if (status) return status;
        }
    }
    return LOSSYNET_OK;
}

/* ---- all-gather ---- */

static lossynet_status link_all_gather(struct lossynet_link *link, void *data,
                                       const size_t *offset) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    int ranks = mpi->settings.world.ranks, code;
    if (offset[ranks] - offset[0] <= INT_MAX) {
        for (int r = 0; r < ranks; r++) {
            mpi->counts[r] = (int)(offset[r + 1] - offset[r]);
            mpi->starts[r] = (int)(offset[r] - offset[0]);
        }
        code = MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, (char *)data + offset[0],
                              mpi->counts, mpi->starts, MPI_BYTE, mpi->comm);
        return code ? failed(mpi, "MPI_Allgatherv", -1, code) : LOSSYNET_OK;
    }
    for (int r = 0; r < ranks; r++) { /* MPI counts in int */
        for (size_t at = offset[r]; at < offset[r + 1];) {
            size_t bytes = offset[r + 1] - at;
            if (bytes > 1u << 30) bytes = 1u << 30;
            code = MPI_Bcast((char *)data + at, (int)bytes, MPI_BYTE, r, mpi->comm);
            if (code) return failed(mpi, "MPI_Bcast", r, code);
            at += bytes;
        }
    }
    return LOSSYNET_OK;
}

/* ---- open and close ---- */

static void link_close(struct lossynet_link *link) {
    struct link_mpi *mpi = (struct link_mpi *)link;
    if (mpi->comm != MPI_COMM_NULL) MPI_Comm_free(&mpi->comm);
    free(mpi->starts);
    free(mpi->counts);
    free(mpi->incoming);
    free(mpi->memory);
    free(mpi->filling);
    free(mpi->train);
    free(mpi);
}

static bool take_buffers(struct link_mpi *mpi, int ranks) {
    size_t n = (size_t)ranks;
    mpi->train = lossynet_memory_take(n, sizeof *mpi->train);
    mpi->filling = lossynet_memory_take(n, sizeof *mpi->filling);
    mpi->memory = lossynet_memory_take(2 * (n - 1), mpi->capacity);
    mpi->incoming = lossynet_memory_take(1, mpi->capacity);
    mpi->counts = lossynet_memory_take(n, sizeof *mpi->counts);
    mpi->starts = lossynet_memory_take(n, sizeof *mpi->starts);
    if (!mpi->train || !mpi->filling || !mpi->memory || !mpi->incoming || !mpi->counts ||
        !mpi->starts)
        return false;
    uint8_t *next = mpi->memory;
    for (int r = 0; r < ranks; r++) {
        for (int i = 0; i < 2; i++) {
            mpi->train[r][i].request = MPI_REQUEST_NULL;
            if (r == mpi->settings.world.rank) continue;
            mpi->train[r][i].bytes = next;
            next += mpi->capacity;
        }
    }
    return true;
}

lossynet_status lossynet_link_mpi_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out) {
    *out = NULL;
    int ranks = settings->world.ranks, started = 0;
    MPI_Initialized(&started);
    if (!started) {
        lossynet_log("%d ranks without MPI: expected lossynet_bootstrap first", ranks);
        return LOSSYNET_LINK;
    }
    struct link_mpi *mpi = lossynet_memory_take(1, sizeof *mpi);
    if (!mpi) goto no_memory;
    mpi->settings = *settings;
    mpi->comm = MPI_COMM_NULL;
    mpi->capacity = train_capacity(ranks, settings->packet_bytes);
    mpi->link = (struct lossynet_link){
        .name = "mpi",
        .memory_bytes = lossynet_link_mpi_memory(ranks, settings->packet_bytes),
        .begin = link_begin,
        .send = link_send,
        .flush = link_flush,
        .progress = link_progress,
        .end = link_end,
        .all_gather = link_all_gather,
        .close = link_close,
    };
    if (!take_buffers(mpi, ranks)) goto close_link;
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
    lossynet_log("rank %d: no memory for the trains of %d ranks", settings->world.rank, ranks);
    return LOSSYNET_NO_MEMORY;
}

#else

lossynet_status lossynet_link_mpi_open(const struct lossynet_link_settings *settings,
                                       struct lossynet_link **out) {
    *out = NULL;
    lossynet_log("%d ranks, but this program was built without MPI: install Open MPI (mpicc) and "
                 "build again",
                 settings->world.ranks);
    return LOSSYNET_LINK;
}

#endif
