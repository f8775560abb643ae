/* dispatch.c — verifies a datagram that has come, and hands it to the file for its type. */
#include "lossynet/transport/progress.h"

void ln_dispatch(struct ln_transport *t, int peer, uint8_t *datagram, size_t bytes) {
    struct wire_header h;
    const uint8_t *payload = datagram + WIRE_HEADER_BYTES;
    int way;
    if (!ln_session_verify(t, &peer, &way, &h, datagram, bytes)) return;
    ln_timer_heard(t, peer, h.type);
    if (h.type == WIRE_PROBE && h.index > 0) ln_detour_asked(t, peer, h.index, way);
    ln_agenda_soon(t, peer);
    t->agenda.sends[peer] = true;
    if (h.type == WIRE_DATA) {
        ln_recv_data(t, peer, &h, payload);
        return;
    }
    if (h.type == WIRE_MESSAGE) {
        ln_message_receive(t, peer, &h, payload);
        return;
    }
    if (h.type == WIRE_TELL) {
        ln_ask_told(t, peer, &h, payload);
        return;
    }
    bool of_phase = h.kind < WIRE_MESSAGES;
    bool valid = ln_control_receive(t, peer, &h, payload) && (h.type != WIRE_DONE || of_phase);
    if (!valid)
        t->receiver.rejected.invalid++;
    else if (h.type == WIRE_DONE)
        ln_recv_done(t, peer, &h);
    else if (h.type == WIRE_ASK)
        ln_ask_receive(t, peer, &h);
    else if (h.type == WIRE_ACK && !of_phase)
        ln_message_acknowledge(t, peer, &h, payload);
}
