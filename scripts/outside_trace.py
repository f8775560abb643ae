#!/usr/bin/env python3
"""Makes a loss trace from what another tool recorded, for --loss-model trace:FILE.

    scripts/outside_trace.py ns3 ascii.tr > trace  # of a queue
    scripts/outside_trace.py htsim log.txt > trace # by parse_output log -ascii
    scripts/outside_trace.py pcap sent.pcap received.pcap > trace
    build/train_llama2 --loss-model trace:trace --loss-rate 1 ...

How it maps: one character for each packet in the order of time, flow after
flow, 0 arrives and 1 is lost. Each link of a run begins at its own place of the
trace and reads on in a circle, so lengths need not agree; runs of losses stay
runs, and which link lost what at which time does not stay. What was lost is
reported on stderr.

ns3   lines of AsciiTraceHelper: "+ TIME PATH ..." is a packet that a queue
      took, "d TIME PATH ..." one that it dropped; a flow is a path
      (/NodeList/0/DeviceList/1/...). "-", "r" and "t" do not count.
htsim lines of a queue or traffic logger, "TIME ... ID n Ev E FlowID f PktID p".
      A packet that a queue drops, trims or bounces is lost. It counts once on
      all of its way (ENQUEUE, ARRIVE), and anew when its number comes back to a
      place where it was. Of lines with a Ptype only DATA counts.
pcap  classic pcap of Ethernet (also with VLAN tags), raw IP or Linux "any" with
      IPv4 UDP or TCP; other packets do not count. A flow is source, target,
      protocol and ports. A packet that was sent and not received is lost. It is
      found again by its IPv4 identification and the bytes after its IP header
      but the checksum, which a network card may write after the capture. So
      both files must hold as much of each packet, and no card may split or join
      packets (ethtool -K DEVICE gso off gro off tso off). A packet that came
      twice counts once. sent.pcap should hold what the host sent (tcpdump -Q
      out): what it received counts as arrived. Packets that are only in
      received.pcap do not count.
"""
import argparse
import collections
import re
import signal
import struct
import sys

# Before the IP header, by link type: how many bytes, and where of them the protocol stands.
LINK = {1: (14, 12), 12: (0, None), 101: (0, None), 113: (16, 14), 276: (20, 0), 228: (0, None)}
IPV4, VLANS = b"\x08\x00", (b"\x81\x00", b"\x88\xa8")
CHECKSUM = {6: 16, 17: 6}  # where it stands in a header of TCP and of UDP


def fail(text):
    print(f"outside_trace.py: {text}", file=sys.stderr)
    sys.exit(1)


def read_ns3(path):
    """{flow: "0010..."}"""
    flows = collections.defaultdict(list)
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            if not words or words[0] in ("-", "r", "t"):
                continue
            if words[0] not in ("+", "d") or len(words) < 3 or not words[2].startswith("/NodeList/"):
                fail(f"{path}, line {number}: expected '+', '-', 'd', 'r' or 't', a time and a path of /NodeList/")
            flows["/".join(words[2].split("/")[:5])].append("1" if words[0] == "d" else "0")
    return flows


def read_htsim(path):
    """{flow: "0010..."}"""
    flows = collections.defaultdict(list)
    packets_seen = {}  # by flow and number: where it stands in its flow, and the places where it was since it was sent
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            if words and not re.fullmatch(r"[0-9.]+", words[0]):
                fail(f"{path}, line {number}: expected a time, as parse_output FILE -ascii prints it")
            field = dict(zip(words[1::2], words[2::2]))
            event, packet = field.get("Ev"), field.get("PktID", field.get("Seqno"))
            if event not in ("ENQUEUE", "ARRIVE", "DROP", "TRIM", "BOUNCE") or "FlowID" not in field or not packet:
                continue
            if field.get("Ptype", "DATA") != "DATA":
                continue
            flow, place = flows[field["FlowID"]], (field.get("Type"), field.get("ID"))
            at, places = packets_seen.get((field["FlowID"], packet), (-1, set()))
            moves = event not in ("TRIM", "BOUNCE")  # a trimmed packet enters the same queue again
            if at < 0 or (moves and place in places):
                at, places = len(flow), set()
                flow.append("0")
                packets_seen[field["FlowID"], packet] = at, places
            (places.add if moves else places.discard)(place)
            if event in ("DROP", "TRIM", "BOUNCE"):
                flow[at] = "1"
    return flows


def ipv4_of(link, data):
    """The IPv4 packet of a frame, without padding; empty if it has none."""
    start, place = LINK[link]
    while place is not None and data[place:place + 2] in VLANS and place == start - 2:
        start, place = start + 4, place + 4
    ip = data[start:]
    if place is not None and data[place:place + 2] != IPV4 or len(ip) < 20 or ip[0] >> 4 != 4:
        return b""
    return ip[:int.from_bytes(ip[2:4], "big") or None]  # 0: longer than the field can say


def packets(path):
    """Yields (flow, identity) of each UDP or TCP packet over IPv4 of a pcap file."""
    with open(path, "rb") as file:
        head = file.read(24)
        order = {b"\xd4\xc3\xb2\xa1": "<", b"\x4d\x3c\xb2\xa1": "<", b"\xa1\xb2\xc3\xd4": ">",
                 b"\xa1\xb2\x3c\x4d": ">"}.get(head[:4])
        if not order or len(head) < 24:
            fail(f"{path}: expected a pcap file (not pcapng: tshark -F pcap writes one)")
        link = struct.unpack(order + "I", head[20:])[0] & 0xFFFF
        if link not in LINK:
            fail(f"{path}: link type {link}: expected Ethernet (1), raw IP (101, 228) or Linux cooked (113, 276)")
        while record := file.read(16):
            length = struct.unpack(order + "II", record[8:])[0] if len(record) == 16 else -1
            data = file.read(max(length, 0))
            if length < 0 or len(data) < length:
                fail(f"{path}: it is cut off")
            ip = ipv4_of(link, data)
            if not ip or ip[9] not in CHECKSUM:
                continue
            body, first = ip[(ip[0] & 15) * 4:], not int.from_bytes(ip[6:8], "big") & 0x1FFF
            place = CHECKSUM[ip[9]]
            same = body[:place] + body[place + 2:] if first else body
            yield (ip[12:16], ip[16:20], ip[9], body[:4] if first else b""), (ip[4:8], same)


def read_pcap(sent, received):
    came = {(flow, identity) for flow, identity in packets(received)}
    flows, seen = collections.defaultdict(list), set()
    for flow, identity in packets(sent):
        if (flow, identity) not in seen:
            seen.add((flow, identity))
            flows[flow].append("0" if (flow, identity) in came else "1")
    return flows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("ns3").add_argument("files", nargs=1, metavar="FILE")
    kinds.add_parser("htsim").add_argument("files", nargs=1, metavar="FILE")
    kinds.add_parser("pcap").add_argument("files", nargs=2, metavar="FILE")
    arguments = parser.parse_args()
    try:
        flows = {"ns3": read_ns3, "htsim": read_htsim, "pcap": read_pcap}[arguments.kind](*arguments.files)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    if not flows:
        fail(f"{arguments.files[0]}: it has no packets" + " of UDP or TCP over IPv4" * (arguments.kind == "pcap"))
    count, lost = sum(map(len, flows.values())), sum(flow.count("1") for flow in flows.values())
    if lost == count:
        fail(f"{arguments.files[-1]}: all {count} packets are lost: expected also those that arrived")
    print(f"# {arguments.kind}: {count} packets of {len(flows)} flows, {lost} lost")
    for flow in flows.values():
        text = "".join(flow)
        for start in range(0, len(text), 100):
            print(text[start:start + 100])
    print(f"{count} packets of {len(flows)} flows, {lost / count:.2%} lost", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
