"""Tests scripts/outside_trace.py: recordings of other tools become traces that the program reads."""
import struct
import subprocess
import sys

import pytest

from program import ROOT, markov_files, read_log, succeed

pytestmark = pytest.mark.quick

NS3 = """\
+ 1.0 /NodeList/0/DeviceList/1/$ns3::PointToPointNetDevice/TxQueue/Enqueue ns3::PppHeader (Point-to-Point Protocol: IP)
- 1.0 /NodeList/0/DeviceList/1/$ns3::PointToPointNetDevice/TxQueue/Dequeue ns3::PppHeader
d 1.1 /NodeList/0/DeviceList/1/$ns3::PointToPointNetDevice/TxQueue/Drop ns3::PppHeader
+ 1.1 /NodeList/2/DeviceList/1/$ns3::PointToPointNetDevice/TxQueue/Enqueue ns3::PppHeader
r 1.2 /NodeList/1/DeviceList/1/$ns3::PointToPointNetDevice/MacRx ns3::PppHeader
+ 1.2 /NodeList/0/DeviceList/1/$ns3::PointToPointNetDevice/TxQueue/Enqueue ns3::PppHeader
d 1.3 /NodeList/2/DeviceList/1/$ns3::PointToPointNetDevice/TxQueue/Drop ns3::PppHeader
"""
# Two queues (3 and 5) and flows: packet 2 of flow 7 is dropped at the second queue and sent again, 4 is trimmed, and
# flow 8 loses its only packet twice before it comes by another queue. Sampled queues and acknowledgements do not count.
HTSIM = """\
0.000001000 ID 3 Ev ENQUEUE Qsize 9000 FlowID 7 PktID 1
0.000001500 ID 3 Ev SERVICE Qsize 0 FlowID 7 PktID 1
0.000001600 ID 5 Ev ENQUEUE Qsize 9000 FlowID 7 PktID 1
0.000001700 Type QUEUE_APPROX ID 5 Ev RANGE LastQ 0 MinQ 0 MaxQ 9000
0.000002000 ID 3 Ev ENQUEUE Qsize 9000 FlowID 7 PktID 2
0.000002100 ID 3 Ev DROP Qsize 9000 FlowID 8 PktID 1
0.000002200 ID 5 Ev DROP Qsize 9000 FlowID 7 PktID 2
0.000002200 Type TRAFFIC ID 5 Ev DROP  FlowID 7 PktID 2
0.000003000 ID 3 Ev ENQUEUE Qsize 9000 FlowID 7 PktID 3

0.000004000 ID 3 Ev ENQUEUE Qsize 9000 FlowID 7 PktID 2
0.000004100 ID 3 Ev DROP Qsize 9000 FlowID 8 PktID 1
0.000005000 ID 3 Ev TRIM Qsize 9000 FlowID 7 PktID 4
0.000005000 ID 3 Ev ENQUEUE Qsize 9000 FlowID 7 PktID 4
0.000005100 ID 5 Ev ENQUEUE Qsize 64 FlowID 7 PktID 4
0.000006000 ID 4 Ev ENQUEUE Qsize 9000 FlowID 8 PktID 1
0.000007000 Type NDPTRAFFIC ID 9 Ev DROP  FlowID 7 Ptype ACK Ackno 1 Psize FULL
0.000008000 Type NDPTRAFFIC ID 3 Ev ARRIVE  FlowID 9 Ptype DATA Seqno 1 flag LASTDATA Psize FULL
"""


def convert(*words):
    return subprocess.run([sys.executable, ROOT / "scripts" / "outside_trace.py", *map(str, words)], text=True,
                          capture_output=True, check=False)


def pcap(path, packets, order="<", link=1, before=None, checksum=0, padding=b"", magic=0xA1B2C3D4, snap=65535,
         six=None):
    """Writes UDP packets (port, IPv4 identification, payload)."""
    before = before or {1: bytes(12) + b"\x08\x00", 9: b"\x00\x21", 101: b"", 113: bytes(14) + b"\x08\x00"}[link]
    data = struct.pack(order + "IHHIIII", magic, 2, 4, 0, 0, 65535, link)
    for port, identity, payload in packets:
        body = struct.pack(">HHHH", port, 9, 8 + len(payload), checksum) + payload
        if six is not None:
            head = struct.pack(">IHBB16s16s", 6 << 28, len(six) + len(body), 0 if six else 17, 64, b"s" * 16, b"t" * 16)
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), identity, 0, 64, 17, 0, b"\x0a\0\0\1", b"\x0a\0\0\2")
        frame = before + (ip if six is None else head + six) + body + padding
        data += struct.pack(order + "IIII", 0, 0, min(len(frame), snap), len(frame)) + frame[:snap]
    path.write_bytes(data)
    return path


def next_generation(path, order="<"):
    """The same packets as pcapng, by turns in both kinds of packet blocks, and a block that is skipped."""
    size = lambda body: struct.pack(order + "I", len(body) + 12)
    block = lambda kind, body: struct.pack(order + "I", kind) + size(body) + body + size(body)
    data, made, place, simple = path.read_bytes(), b"", 24, False
    for kind, body in ((0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1)), (5, bytes(12)),
                       (1, struct.pack(order + "HHI", struct.unpack(order + "I", data[20:24])[0], 0, 65535))):
        made += block(kind, body)
    while place < len(data):
        held, full = struct.unpack(order + "II", data[place + 8:place + 16])
        body = data[place + 16:place + 16 + held] + bytes(-held % 4)
        simple, place = not simple and held == full, place + 16 + held
        made += block(3, struct.pack(order + "I", full) + body) if simple else \
            block(6, struct.pack(order + "5I", 0, 0, 0, held, full) + body)
    path.write_bytes(made)
    return path


def digits(done):
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("#")]


def test_ns3(tmp_path):
    (tmp_path / "a.tr").write_text(NS3)
    done = convert("ns3", tmp_path / "a.tr")
    assert digits(done) == ["010", "01"] and "5 packets of 2 flows, 40.00% lost" in done.stderr


def test_ns3_error_model(tmp_path):
    """What a receiver drops counts once, where it was sent; of packets that look alike, the oldest on its way."""
    line = "{} 1 /NodeList/{}/DeviceList/0/$ns3::PointToPointNetDevice/{} ns3::PppHeader id {}\n".format
    sent = [line("+", 0, "TxQueue/Enqueue", number) for number in (0, 1, 2, 2)]
    dropped = [line("d", 1, "PhyRxDrop", 1), line("d", 1, "PhyRxDrop", 2)]
    (tmp_path / "a.tr").write_text("".join([*sent, line("r", 1, "MacRx", 0), *dropped, line("r", 1, "MacRx", 2)]))
    done = convert("ns3", tmp_path / "a.tr")
    assert digits(done) == ["0110"] and "4 packets of 1 flows, 50.00% lost" in done.stderr
    (tmp_path / "a.tr").write_text("".join(dropped))
    assert "line 1: /NodeList/1/DeviceList/0/$ns3::PointToPointNetDevice/PhyRxDrop drops what no queue" in \
        convert("ns3", tmp_path / "a.tr").stderr


def test_htsim(tmp_path):
    (tmp_path / "log.txt").write_text(HTSIM)
    done = convert("htsim", tmp_path / "log.txt")
    assert digits(done) == ["01001", "110", "0"] and "9 packets of 3 flows" in done.stderr
    (tmp_path / "drops").write_text("".join(line for line in HTSIM.splitlines(True) if "DROP" in line))
    done = convert("htsim", tmp_path / "drops")
    assert done.returncode == 1 and "drops: all 3 packets are lost: expected also those that arrived" in done.stderr


@pytest.mark.parametrize("order, link", [("<", 1), (">", 101), ("<", 113), (">", 9)])
def test_pcap(order, link, tmp_path):
    """A packet is lost where the receiver has not seen it, also if another one has the same payload or number."""
    sent = [(1, number % 7, b"x%d" % (number // 3)) for number in range(20)] + [(2, 0, b"other")]
    there = [packet for place, packet in enumerate(sent) if place not in (3, 4, 11, 20)]
    sent.insert(6, sent[5])  # twice on the wire
    paths = pcap(tmp_path / "s", sent, order, link), pcap(tmp_path / "r", there[::-1] + [(1, 9, b"of another")], order, link)
    for kind in ("pcap", "pcapng"):
        if kind == "pcapng":
            next_generation(paths[0], order)
        done = convert("pcap", *paths)
        assert digits(done) == ["00011000000100000000", "1"] and "21 packets of 2 flows" in done.stderr


def test_what_cards_and_switches_change(tmp_path):
    """Where a packet was captured may change its checksum, padding and VLAN tags, but not whether it arrived."""
    sent = [(1, number, b"x%d" % number) for number in range(6)]
    tagged = bytes(12) + b"\x88\xa8\x40\x05\x81\x00\x40\x05\x08\x00"
    paths = (pcap(tmp_path / "s", sent, checksum=0x1234, magic=0xA1B23C4D),
             pcap(tmp_path / "r", sent[:3] + sent[4:], before=tagged, checksum=0xFEDC, padding=bytes(9)))
    assert digits(convert("pcap", *paths)) == ["000100"]
    other = pcap(tmp_path / "6", sent, before=bytes(12) + b"\x08\x06")
    assert "6: it has no packets of UDP or TCP over IP" in convert("pcap", other, paths[1]).stderr
    for six in (b"", b"\x3c\0" + bytes(6) + b"\x11\1" + bytes(14)):  # headers hop by hop and of the destination
        paths = (pcap(tmp_path / "s", sent, before=bytes(12) + b"\x86\xdd", six=six),
                 pcap(tmp_path / "r", sent[1:], six=six, link=101, checksum=7))
        paths[0].write_bytes(paths[0].read_bytes() + other.read_bytes()[24:])
        done = convert("pcap", *paths)
        assert digits(done) == ["100000"] and "s: 6 packets are not UDP or TCP over IP" in done.stderr


def test_captures_that_differ(tmp_path):
    """One file may have less of each packet, and packets to other hosts; cards that split or join packets are told."""
    sent = [(1, number, b"x" * 80 + b"%d" % number) for number in range(6)]
    paths = pcap(tmp_path / "s", sent, snap=64), pcap(tmp_path / "r", sent[:3] + sent[4:], snap=58, link=101)
    other = pcap(tmp_path / "o", sent).read_bytes()[24:].replace(b"\x0a\0\0\2", b"\x0a\0\0\3")
    paths[0].write_bytes(paths[0].read_bytes() + other + pcap(tmp_path / "again", sent[:1], snap=64).read_bytes()[24:])
    done = convert("pcap", *paths)
    assert digits(done) == ["000100"] and "s: 6 packets are of hosts that" in done.stderr
    assert "s: 1 packets are there again" in done.stderr
    back = paths[1].read_bytes()[24:].replace(struct.pack(">HH", 1, 9), struct.pack(">HH", 9, 1))
    back = back.replace(bytes((10, 0, 0, 1, 10, 0, 0, 2)), bytes((10, 0, 0, 2, 10, 0, 0, 1)))
    for path in (tmp_path / "a", tmp_path / "b"):
        path.write_bytes(paths[1].read_bytes() + back)
    assert "a: 2 flows have one in the other direction" in convert("pcap", tmp_path / "a", tmp_path / "b").stderr
    large = pcap(tmp_path / "large", [(1, 0, bytes(9000)), (1, 1, b"x")])
    small = pcap(tmp_path / "small", [(1, number, bytes(1400)) for number in range(7)])
    for pair in ((large, small), (small, large)):
        assert "expected captures without splitting or joining" in convert("pcap", *pair).stderr
    assert "small: it has 36 bytes of an IP packet" in convert("pcap", pcap(small, sent, snap=50), large).stderr


def test_the_program_reads_it(tmp_path):
    data = markov_files(tmp_path, 64, 4000, 600)
    (tmp_path / "a.tr").write_text(NS3 * 50)
    (tmp_path / "trace").write_text(convert("ns3", tmp_path / "a.tr").stdout)
    succeed("--model=260K", f"--train={data}/train.bin", "--workers=4", "--batch=1", "--seq=32", "--steps=8", "--plain",
            "--packet-bytes=256", f"--loss-model=trace:{tmp_path}/trace", "--loss-rate=1", f"--out={tmp_path}/out")
    end = read_log(tmp_path / "out" / "log.jsonl")[-1]
    assert end["gradient_loss_rate"] == pytest.approx(0.4, abs=0.03)


def test_wrong_files_get_one_line(tmp_path):
    (tmp_path / "bad.tr").write_text("hello world\n")
    (tmp_path / "empty").write_text("")
    whole = pcap(tmp_path / "p", [(1, 1, b"x")])
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:-3])
    (tmp_path / "cut.ng").write_bytes(next_generation(pcap(tmp_path / "q", [(1, 1, b"x")])).read_bytes()[:-3])
    (tmp_path / "damaged").write_bytes(whole.read_bytes() + bytes(8) + b"\xff" * 8)
    for words, says in ((("ns3", tmp_path / "bad.tr"), "bad.tr, line 1: expected '+'"),
                        (("ns3", tmp_path / "empty"), "it has no packets"),
                        (("ns3", tmp_path / "none"), "No such file"),
                        (("htsim", tmp_path / "bad.tr"), "bad.tr, line 1: expected a time"),
                        (("pcap", tmp_path / "bad.tr", whole), "expected a pcap or pcapng file"),
                        (("pcap", tmp_path / "cut", whole), "cut: it is cut off"),
                        (("pcap", tmp_path / "cut.ng", whole), "cut.ng: it is cut off"),
                        (("pcap", tmp_path / "damaged", whole), "damaged: it is cut off or damaged")):
        done = convert(*words)
        assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
