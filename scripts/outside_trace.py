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

ns3   lines of AsciiTraceHelper with a stream of all devices
      (EnableAsciiAll(helper.CreateFileStream("all.tr"))): "+ TIME PATH ..." is
      a packet that a queue took, "d TIME PATH .../TxQueue/Drop" one that it
      dropped; a flow is a path (/NodeList/0/DeviceList/1/...). A "d" elsewhere
      (PhyRxDrop: an error model) is of a packet that a queue took before: the
      oldest with this text that no "r" has. "-" and "t" do not count.
htsim lines of a queue or traffic logger, "TIME ... ID n Ev E FlowID f PktID p".
      A packet that a queue drops, trims or bounces is lost. It counts once on
      all of its way (ENQUEUE, ARRIVE), and anew when its number comes back to a
      place where it was, or elsewhere after a drop. Of lines with a Ptype only
      DATA counts.
pcap  pcap or pcapng of Ethernet (VLAN tags, too), PPP (ns-3), raw IP or Linux
      "any" with UDP or TCP over IP; other packets do not count, nor do those of
      hosts that received.pcap does not have. A flow is source, target, protocol
      and ports. A packet that was sent and not received is lost. It is found
      again by its IPv4 identification, its length and the bytes after IP (of
      cut packets as many as both files have) but the checksum, which a network
      card may write after the capture. No card may split or join
      packets (ethtool -K DEVICE gso off gro off tso off). A packet that came
      twice counts once. sent.pcap should hold what the host sent (tcpdump -Q
      out): what it received counts as arrived. received.pcap should begin
      before and end after it; packets that are only there do not count.
"""
import argparse
import collections
import re
import signal
import struct
import sys
import typing

# Before the IP header, by link type: how many bytes, and where of them the protocol stands.
LINK = {1: (14, 12), 9: (2, 0), 113: (16, 14), 276: (20, 0), **dict.fromkeys((12, 101, 228, 229), (0, None))}
IP, VLANS = (b"\x08\x00", b"\x86\xdd", b"\x00\x21", b"\x00\x57"), (b"\x81\x00", b"\x88\xa8")  # 21, 57: of PPP
FRAGMENT, EXTENSIONS = 44, (0, 43, 44, 60)  # headers of IPv6
LONGEST = 1 << 18  # bytes of a frame that a capture may hold
CHECKSUM = {6: 16, 17: 6}  # where it stands in a header of TCP and of UDP


def fail(text):
    print(f"outside_trace.py: {text}", file=sys.stderr)
    sys.exit(1)


def events_of_ns3(path):
    """Yields (line number, event, its path, the packet's text, whether it is a drop outside a queue)."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            words = line.split(None, 3)
            if not words or words[0] in ("-", "t"):
                continue
            if words[0] not in ("+", "d", "r") or len(words) < 3 or not words[2].startswith("/NodeList/"):
                fail(f"{path}, line {number}: expected '+', '-', 'd', 'r' or 't', a time and a path of /NodeList/, "
                     "as a helper writes with a stream (--help)")
            outside = words[0] == "d" and "/TxQueue/" not in words[2]
            yield number, words[0], words[2], "".join(words[3:]).rstrip(), outside


def read_ns3(path):
    """{flow: "0010..."}"""
    flows = collections.defaultdict(list)
    on_way = {packet: [] for *_, packet, outside in events_of_ns3(path) if outside}  # flows and places in them
    for number, event, where, packet, outside in events_of_ns3(path):
        if event == "r" or outside:
            if on_way.get(packet):
                sent, place = on_way[packet].pop(0)
                sent[place] = "1" if outside else "0"
            elif outside:
                fail(f"{path}, line {number}: {where} drops what no queue took before: expected the trace of all "
                     "devices, and no drops of other layers")
            continue
        flow = flows["/".join(where.split("/")[:5])]
        if event == "+" and packet in on_way:
            on_way[packet].append((flow, len(flow)))
        flow.append("1" if event == "d" else "0")
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
            if at < 0 or (moves and place in places) or (event in ("ENQUEUE", "ARRIVE") and "dropped" in places):
                at, places = len(flow), set()
                flow.append("0")
                packets_seen[field["FlowID"], packet] = at, places
            if event == "DROP":
                places.add("dropped")
            (places.add if moves else places.discard)(place)
            if event in ("DROP", "TRIM", "BOUNCE"):
                flow[at] = "1"
    return flows


class Ip(typing.NamedTuple):
    """An IP packet. identity: what the sender gave it, where it is a fragment of; body: where TCP or UDP begins."""
    data: bytes
    length: int  # on the wire
    hosts: tuple
    protocol: int
    body: int
    identity: bytes
    first: bool


def ip_of(link, data, cut):
    """The IP packet of a frame, without padding; None if it has none. cut: bytes that the capture left out."""
    start, place = LINK[link]
    while place is not None and data[place:place + 2] in VLANS and place == start - 2:
        start, place = start + 4, place + 4
    ip = data[start:]
    if place is not None and data[place:place + 2] not in IP or len(ip) < 20:
        return None
    if ip[0] >> 4 == 4:
        length = int.from_bytes(ip[2:4], "big") or len(ip) + cut  # 0: longer than the field can say
        return Ip(ip[:length], length, (ip[12:16], ip[16:20]), ip[9], (ip[0] & 15) * 4, ip[4:8],
                  not int.from_bytes(ip[6:8], "big") & 0x1FFF)
    if ip[0] >> 4 != 6 or len(ip) < 40:
        return None
    length = 40 + int.from_bytes(ip[4:6], "big") if ip[4:6] != b"\0\0" else len(ip) + cut
    protocol, body, identity, first = ip[6], 40, b"", True
    while protocol in EXTENSIONS and len(ip) >= body + 8:
        if protocol == FRAGMENT:
            identity, first = ip[body + 2:body + 8], not int.from_bytes(ip[body + 2:body + 4], "big") & 0xFFF8
        protocol, body = ip[body], body + (8 if protocol == FRAGMENT else 8 * ip[body + 1] + 8)
    return Ip(ip[:length], length, (ip[8:24], ip[24:40]), protocol, body, identity, first)


def blocks(file):
    """Yields (link type, bytes, their number on the wire) of each frame of a pcapng file."""
    order, links, limits = "<", [], []
    while head := file.read(12):
        if head[:4] == b"\n\r\r\n":  # a section begins
            order, links, limits = "<" if head[8:] == b"\x4d\x3c\x2b\x1a" else ">", [], []
        kind, length = struct.unpack(order + "II", head[:8])
        body = head[8:] + (file.read(length - 12) if 12 <= length <= 2 * LONGEST else b"")
        if len(body) != length - 8:
            raise IndexError
        if kind == 1:
            links.append(struct.unpack(order + "H", body[:2])[0])
            limits.append(struct.unpack(order + "I", body[4:8])[0] or LONGEST)
        elif kind == 6:
            interface, _, _, count, full = struct.unpack(order + "5I", body[:20])
            yield links[interface], body[20:-4][:count], full
        elif kind == 3:
            full = struct.unpack(order + "I", body[:4])[0]
            yield links[0], body[4:-4][:min(full, limits[0])], full


def frames(path, file):
    """The same of a pcap file of either kind."""
    head = file.read(24)
    if head[:4] == b"\n\r\r\n":
        file.seek(0)
        yield from blocks(file)
        return
    order = {b"\xd4\xc3\xb2\xa1": "<", b"\x4d\x3c\xb2\xa1": "<", b"\xa1\xb2\xc3\xd4": ">",
             b"\xa1\xb2\x3c\x4d": ">"}.get(head[:4])
    if not order or len(head) < 24:
        fail(f"{path}: expected a pcap or pcapng file, not compressed")
    link = struct.unpack(order + "I", head[20:])[0] & 0xFFFF
    while record := file.read(16):
        length, full = struct.unpack(order + "II", record[8:])
        data = file.read(length) if length <= LONGEST else b""
        if len(data) < length:
            raise IndexError
        yield link, data, full


def ip_packets(path):
    """Yields each UDP or TCP packet over IP of a pcap file, and None for each other packet."""
    with open(path, "rb") as file:
        try:
            for link, data, full in frames(path, file):
                if link not in LINK:
                    fail(f"{path}: link type {link}: expected Ethernet (1), PPP (9), raw IP (12, 101, 228, 229) or "
                         "Linux cooked (113, 276)")
                ip = ip_of(link, data, max(full - len(data), 0))
                yield ip if ip and ip.protocol in CHECKSUM else None
        except (struct.error, IndexError):
            fail(f"{path}: it is cut off or damaged: expected whole packets (editcap FILE NEW keeps those)")


def held(path):
    """How many bytes of its IP packets a file has if it cuts some off."""
    least = LONGEST
    for ip in ip_packets(path):
        if ip and len(ip.data) < ip.length:
            least = min(least, len(ip.data))
            if least < ip.body + 20:
                fail(f"{path}: it has {least} bytes of an IP packet: expected its headers (tcpdump -s 128)")
    return least


def packets(path, most):
    """Yields (flow, identity, bytes) of each packet, and None for what does not count. most: how many bytes count."""
    for ip in ip_packets(path):
        if not ip:
            yield None
            continue
        body, place = ip.data[ip.body:most], CHECKSUM[ip.protocol]
        same = body[:place] + body[place + 2:] if ip.first else body
        flow = (*ip.hosts, ip.protocol, body[:4] if ip.first else b"")
        yield flow, (ip.identity, ip.length, same), ip.length


def read_pcap(sent, received):
    most = min(held(sent), held(received))
    hosts, came, longest_there, longest = set(), set(), collections.Counter(), collections.Counter()
    for flow, identity, length in filter(None, packets(received, most)):
        hosts.update(flow[:2])
        came.add((flow, identity))
        longest_there[flow] = max(longest_there[flow], length)
    flows, seen, others, elsewhere, twice = collections.defaultdict(list), set(), 0, 0, 0
    for packet in packets(sent, most):
        if not packet:
            others += 1
            continue
        flow, identity, length = packet
        if not hosts.issuperset(flow[:2]):
            elsewhere += 1
        elif (flow, identity) in seen:
            twice += 1
        else:
            seen.add((flow, identity))
            longest[flow] = max(longest[flow], length)
            flows[flow].append("0" if (flow, identity) in came else "1")
    for flow in flows:
        few, many = sorted((longest[flow], longest_there[flow]))
        if many > max(1500, 1.5 * few) and few:
            fail(f"{sent}, {received}: the longest packets of a flow have {longest[flow]} and {longest_there[flow]} "
                 "bytes: expected captures without splitting or joining (ethtool -K DEVICE gso off gro off tso off)")
    both = sum((target, source, protocol, ports[2:] + ports[:2]) in flows for source, target, protocol, ports in flows)
    for number, what in ((others, "packets are not UDP or TCP over IP: they do not count"),
                         (elsewhere, f"packets are of hosts that {received} does not have: they do not count"),
                         (twice, "packets are there again with the same bytes: they do not count"),
                         (both, "flows have one in the other direction: what this host received counts as arrived")):
        if number:
            print(f"{sent}: {number} {what}", file=sys.stderr)
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
        fail(f"{arguments.files[0]}: it has no packets" + {
            "ns3": " that a queue took or dropped ('+', 'd')", "htsim": "",
            "pcap": f" of UDP or TCP over IP between hosts that {arguments.files[-1]} has"}[arguments.kind])
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
