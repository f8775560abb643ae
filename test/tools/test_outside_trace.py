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


def convert(*words):
    return subprocess.run([sys.executable, ROOT / "scripts" / "outside_trace.py", *map(str, words)], text=True,
                          capture_output=True, check=False)


def pcap(path, packets, order="<", link=1):
    """Writes UDP packets (port, IPv4 identification, payload)."""
    before = {1: bytes(12) + b"\x08\x00", 101: b"", 113: bytes(16)}[link]
    data = struct.pack(order + "IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, link)
    for port, identity, payload in packets:
        body = struct.pack(">HHHH", port, 9, 8 + len(payload), 0) + payload
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), identity, 0, 64, 17, 0, b"\x0a\0\0\1", b"\x0a\0\0\2")
        frame = before + ip + body
        data += struct.pack(order + "IIII", 0, 0, len(frame), len(frame)) + frame
    path.write_bytes(data)
    return path


def digits(done):
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("#")]


def test_ns3(tmp_path):
    (tmp_path / "a.tr").write_text(NS3)
    done = convert("ns3", tmp_path / "a.tr")
    assert digits(done) == ["010", "01"] and "5 packets of 2 flows, 40.00% lost" in done.stderr


@pytest.mark.parametrize("order, link", [("<", 1), (">", 101), ("<", 113)])
def test_pcap(order, link, tmp_path):
    """A packet is lost where the receiver has not seen it, also if another one has the same payload or number."""
    sent = [(1, number % 7, b"x%d" % (number // 3)) for number in range(20)] + [(2, 0, b"other")]
    there = [packet for place, packet in enumerate(sent) if place not in (3, 4, 11, 20)]
    sent.insert(6, sent[5])  # twice on the wire
    paths = pcap(tmp_path / "s", sent, order, link), pcap(tmp_path / "r", there[::-1] + [(1, 9, b"of another")], order, link)
    done = convert("pcap", *paths)
    assert digits(done) == ["00011000000100000000", "1"] and "21 packets of 2 flows" in done.stderr


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
    for words, says in ((("ns3", tmp_path / "bad.tr"), "bad.tr, line 1: expected '+'"),
                        (("ns3", tmp_path / "empty"), "it has no packets"),
                        (("ns3", tmp_path / "none"), "No such file"),
                        (("pcap", tmp_path / "bad.tr", whole), "expected a pcap file"),
                        (("pcap", tmp_path / "cut", whole), "cut: it is cut off")):
        done = convert(*words)
        assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
