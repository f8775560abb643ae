/* fake_link.h — a link of rank 0 whose peers are the test: it hears what rank 0 sends, and answers
 * or not. Ranks that are threads exchange over mailboxes.h or over UDP. */
#ifndef TEST_FAKE_LINK_H
#define TEST_FAKE_LINK_H

#include "test/lossynet/test_lossynet.h"

enum { FAKE_ANSWERS = 256, FAKE_BYTES = WIRE_HEADER_BYTES + WIRE_STATE_BYTES };

static struct {
    struct ln_link link;
    size_t room; /* bytes of payload; 0: 4096 */
    /* Called in the progress engine's thread for each datagram that rank 0 sends; NULL: not. */
    void (*hear)(int peer, const uint8_t *header);
    uint8_t answer[FAKE_ANSWERS][FAKE_BYTES], shown[LOSSYNET_BATCH][FAKE_BYTES];
    int peer[FAKE_ANSWERS], answers;
    bool floods; /* strangers keep the receive queue full */
} fake;

/* Rank 0 receives this control datagram from the peer next, unless too many wait already. Only for
 * `hear`: answers belong to the progress engine's thread. */
static inline void fake_answer(int peer, const uint8_t datagram[FAKE_BYTES]) {
    if (fake.answers == FAKE_ANSWERS) return;
    memcpy(fake.answer[fake.answers], datagram, FAKE_BYTES);
    fake.peer[fake.answers++] = peer;
}

/* The same of a datagram of this type, for one that rank 0 sent to the peer; its state is empty. */
static inline void fake_reply(int peer, const uint8_t *header, int type) {
    struct wire_header h;
    uint8_t datagram[FAKE_BYTES] = {0};
    wire_decode(&h, header, WIRE_HEADER_BYTES);
    h.type = (uint8_t)type;
    h.sender = (uint16_t)peer, h.receiver = 0;
    h.checksum = 0;
    wire_encode(datagram, &h);
    wire_put(datagram + WIRE_CHECKSUM_AT, ln_crc32c(0, datagram, FAKE_BYTES), 4);
    fake_answer(peer, datagram);
}

static lossynet_status fake_send(struct ln_link *link, int peer, const struct ln_datagram *batch,
                                 int count) {
    (void)link;
    for (int i = 0; fake.hear && i < count; i++) fake.hear(peer, batch[i].header);
    return LOSSYNET_OK;
}

static int fake_receive(struct ln_link *link, struct ln_arrival *arrivals) {
    (void)link;
    int n = 0;
    for (; n < LOSSYNET_BATCH && fake.floods; n++)
        arrivals[n] = (struct ln_arrival){.bytes = fake.shown[n], .count = 1, .peer = -1};
    for (; n < LOSSYNET_BATCH && fake.answers > 0; n++) {
        memcpy(fake.shown[n], fake.answer[--fake.answers], FAKE_BYTES);
        arrivals[n] = (struct ln_arrival){
            .bytes = fake.shown[n], .count = FAKE_BYTES, .peer = fake.peer[fake.answers]};
    }
    return n;
}

static void fake_wait(struct ln_link *link, double seconds) {
    (void)link;
    seconds = fmin(seconds, 1e-3);
    nanosleep(&(struct timespec){.tv_nsec = (long)(seconds * 1e9)}, NULL);
}

static void fake_nothing(struct ln_link *link) {
    (void)link;
}

/* A ln_link_open; what the test hears is chosen before. */
static lossynet_status fake_open(const struct ln_link_settings *settings, struct ln_link **out) {
    (void)settings;
    fake.link = (struct ln_link){
        .name = "test",
        .features.payload_most = fake.room ? fake.room : 4096,
        .features.receive_queue = 1000,
        .send = fake_send,
        .receive = fake_receive,
        .wait = fake_wait,
        .wake = fake_nothing,
        .close = fake_nothing,
    };
    fake.answers = 0;
    *out = &fake.link;
    return LOSSYNET_OK;
}

/* An exchange at the start: the missing ranks say what rank 0 says. */
static lossynet_status fake_exchange(void *context, const struct lossynet_world *world, void *all,
                                     size_t bytes) {
    (void)context;
    for (int r = 1; r < world->ranks; r++) memcpy((char *)all + (size_t)r * bytes, all, bytes);
    return LOSSYNET_OK;
}

#endif
