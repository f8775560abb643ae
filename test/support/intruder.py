"""Sends bad datagrams to ranks, from inside the switch, until it gets SIGTERM.

    intruder.py SEED PORT...

It listens on the switch's ports and sends frames to the hosts that they are addressed to. They look as
if a peer had sent them, with the right addresses and ports. For one in a few datagrams of the run, it
sends the same datagram again, an older one, one that is cut short or has flipped bits, noise, one of
another run, or one from a stranger. It sets UDP's own checksum to 0 (off), so that the kernel accepts
everything. At the end it prints as JSON how many datagrams of each kind it sent.

Frames: Ethernet 14 bytes, IPv4 20, UDP 8, then the headers of lossynet/base/wire.h.
"""
import errno
import json
import random
import signal
import socket
import struct
import sys

ETHERNET, IP, UDP = 14, 20, 8
BODY = ETHERNET + IP + UDP
HEADER = 28
OUTGOING = 4  # PACKET_OUTGOING: frames that this machine sends itself
ETH_P_ALL = 3  # all protocols; otherwise the bridge takes frames before this socket sees them
MAGIC = b"LN"
ONE_IN = 4    # a bad datagram is sent for one in so many that are seen
HELD = 4000   # datagrams that are kept, to be sent again later


def checksum(header):
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    total = (total & 0xffff) + (total >> 16)
    return ~(total + (total >> 16)) & 0xffff


def crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82f63b78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = crc_table()


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xff]
    return crc ^ 0xffffffff


def with_body(frame, body, source=None, port=None):
    """The frame with another payload and, if it is given, another sender."""
    head = bytearray(frame[:BODY])
    struct.pack_into(">H", head, ETHERNET + 2, IP + UDP + len(body))
    if source:
        head[ETHERNET + 12:ETHERNET + 16] = socket.inet_aton(source)
    if port:
        struct.pack_into(">H", head, ETHERNET + IP, port)
    struct.pack_into(">H", head, ETHERNET + 10, 0)
    struct.pack_into(">H", head, ETHERNET + 10, checksum(head[ETHERNET:ETHERNET + IP]))
    struct.pack_into(">HH", head, ETHERNET + IP + 4, UDP + len(body), 0)
    return bytes(head) + body


def another_run(body, chance):
    """The same datagram with another run id, other numbers, and the right checksum for them."""
    out = bytearray(body)
    words = (len(out) - HEADER) // 4
    out[4] ^= 1
    out[HEADER:] = struct.pack(f"<{words}f", *(chance.gauss(0, 1) for _ in range(words)))
    struct.pack_into("<I", out, HEADER - 4, 0)
    struct.pack_into("<I", out, HEADER - 4, crc32c(out))
    return bytes(out)


def flip(body, chance):
    out = bytearray(body)
    for _ in range(chance.randint(1, 8)):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out) if bytes(out) != body else flip(body, chance)


def choose(frame, held, chance):
    """Makes a bad frame from one that was seen. Returns its kind and the frame."""
    body = frame[BODY:]
    kind = chance.choice(["again", "later", "short", "flipped", "noise", "stranger", "other run"])
    if kind == "again":
        return kind, with_body(frame, body)
    if kind == "later":
        old = chance.choice(held)
        return kind, with_body(old, old[BODY:])
    if kind == "short":
        return kind, with_body(frame, body[:chance.randrange(len(body))])
    if kind == "flipped":
        return kind, with_body(frame, flip(body, chance))
    if kind == "noise":
        return kind, with_body(frame, chance.randbytes(chance.randint(0, 1400)))
    if kind == "other run":
        return kind, with_body(frame, another_run(body, chance))
    return kind, with_body(frame, flip(body, chance), "10.77.0.99", chance.randint(1024, 65535))


def main():
    chance = random.Random(int(sys.argv[1]))
    ports, port_of = {}, {}
    for name in sys.argv[2:]:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        opened.bind((name, ETH_P_ALL))
        opened.settimeout(0.001)
        ports[name] = opened
    thrown, held = {}, []
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    while not ended:
        for name, opened in ports.items():
            try:
                frame, address = opened.recvfrom(1 << 14)
            except TimeoutError:
                continue
            if address[2] == OUTGOING:
                continue
            port_of[frame[6:12]] = name
            if frame[12:14] != b"\x08\0" or frame[BODY:BODY + 2] != MAGIC:
                continue
            if len(held) < HELD:
                held.append(frame)
            else:
                held[chance.randrange(HELD)] = frame
            if chance.randrange(ONE_IN) or frame[:6] not in port_of:
                continue
            kind, bad = choose(frame, held, chance)
            if bad[:6] in port_of:
                try:
                    ports[port_of[bad[:6]]].send(bad)
                except OSError as error:  # the host's queue is full
                    if error.errno != errno.ENOBUFS:
                        raise
                    continue
                thrown[kind] = thrown.get(kind, 0) + 1
    print(json.dumps(thrown))


if __name__ == "__main__":
    main()
