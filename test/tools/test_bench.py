"""Tests that make bench-network runs and writes its report. It does not test speeds."""
import json
import subprocess
import sys

import pytest

from program import BUILD, ROOT, TIMEOUT
from test_program import data  # pylint: disable=unused-import
from test_udp import namespaces  # pylint: disable=unused-import

sys.path.insert(0, str(ROOT / "dev" / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.takes(30)


def test_network_benchmark():
    reason = testbed.unavailable()
    if reason:
        pytest.skip(f"{reason}; the network benchmark was not tried")
    if not (BUILD / "dev" / "bench" / "network" / "bench_ring").exists():
        pytest.skip("built without MPI; the network benchmark was not tried")
    done = subprocess.run([sys.executable, ROOT / "dev" / "bench" / "network" / "bench_network.py", "--quick"],
                          check=False, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (BUILD / "bench_network_quick.md").read_text()
    assert done.stdout.strip() == report.strip()
    rows = [line.split("|")[1:-1] for line in report.splitlines() if line.startswith("| 1 |")]
    assert [row[1].strip() for row in rows] == ["0%", "10%"]
    for row in rows:
        delivered, let_through = float(row[4]), float(row[5])
        assert 0.8 < let_through <= 1 and delivered <= let_through
    for section in ("## No rate limit", "## Training", "## Bars"):
        assert section in report
    unlimited = [line.split("|")[1:-1] for line in report.splitlines() if line.startswith("| ours")]
    names = [row[0].strip() for row in unlimited if len(row) == 8]
    if "libcrypto" in subprocess.run(["ldd", BUILD / "dev" / "bench" / "network" / "bench_exchange"], text=True, check=True,
                                     capture_output=True).stdout:
        assert names == ["ours", "ours, encrypted"] and " times the CPU seconds" in report
    else:
        assert names == ["ours"] and "encryption was not measured" in report
    for row in unlimited:
        if len(row) == 8:
            assert float(row[2]) > 0 and float(row[3]) > 0


def test_training_where_the_kernel_drops_packets(namespaces, data, tmp_path):  # pylint: disable=unused-argument
    """Its table has what was lost in the end with and without resends, and a result is not measured twice."""
    kept = tmp_path / "kept.jsonl"
    command = [sys.executable, ROOT / "dev" / "bench" / "network" / "bench_real_loss.py", "--steps=10", "--seeds=81",
               f"--train={data / 'train.bin'}", f"--val={data / 'val.bin'}", f"--results={kept}"]
    made = [subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT) for _ in range(2)]
    assert made[0].returncode == 0, made[0].stdout + made[0].stderr
    assert made[0].stdout == made[1].stdout
    assert sorted(json.loads(line)["kind"] for line in kept.read_text().splitlines()) == \
        sorted(["float32", "same type", "default", "plain"])
    rows = {line.split()[1]: line.split("|")[1:-1] for line in made[0].stdout.splitlines()[2:]}
    lost = {way: [float(share.strip(" %")) for share in row[3].split(",")] for way, row in rows.items()}
    assert all(15 < share < 25 for share in lost["plain"]) and all(share < 10 for share in lost["default"]), lost
    assert 0.4 < float(rows["default"][4]) < 0.8
