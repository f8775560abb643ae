"""A run on many nodes, rehearsed on this machine: --preflight, and the scripts that start it."""
import sys

import pytest

from program import PROGRAM, ROOT, run, write_tokens

sys.path.insert(0, str(ROOT / "dev"))
import hosts as testbed  # pylint: disable=wrong-import-position

# ---- --preflight on this machine ----

def findings(done):
    """What it named; mpirun adds lines of its own."""
    return [line.split(": ", 1)[1] for line in done.stderr.splitlines()
            if line.startswith("train_llama2: ")]


def preflight(*arguments, **keywords):
    return run("--preflight", "--model", "260K", *arguments, **keywords)


@pytest.mark.parametrize("link", ["udp", "mpi"])
def test_all_is_well_on_one_host(tmp_path, link):
    write_tokens(tmp_path / "train.bin", [1] * 1000, 512)
    out = tmp_path / "out"
    done = preflight("--link", link, "--out", out, "--train", tmp_path / "*.bin", ranks=4)
    assert done.returncode == 0 and not findings(done), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pre-flight of 4 ranks on 1 node, 3 rounds of 0.50 s over " + link)
    assert lines[-1] == "all is well: 1 node, 4 ranks"
    assert not list(out.iterdir())  # it left nothing behind


def test_one_rank_alone():
    done = preflight()
    assert done.returncode == 0 and "all is well: 1 node, 1 rank" in done.stdout, done.stderr


def test_what_is_wrong_with_this_host(tmp_path):
    # 70B parameters in float32, twice, on every rank: nobody has that.
    done = run("--preflight", "--model", "70B", "--seq", 128, "--batch", 1, "--device", "cpu",
               ranks=2)
    assert done.returncode == 1
    (line,) = findings(done)
    assert "its ranks need" in line and "GB of the host's memory" in line, line
    done = preflight("--train", tmp_path / "none*.bin", ranks=2)
    assert done.returncode == 1
    (line,) = findings(done)
    assert f"no file matches '{tmp_path}/none*.bin'" in line and line.startswith("node "), line
    (tmp_path / "file").write_text("")
    done = preflight("--out", tmp_path / "file", ranks=2)
    assert done.returncode == 1 and "expected a directory, found a file" in done.stderr


def test_two_modes_at_once():
    done = preflight("--dry-run")
    assert done.returncode == 2 and "expected at most one of them" in done.stderr


# ---- --preflight between hosts ----

@pytest.fixture(scope="module")
def hosts():
    reason = testbed.unavailable()
    if reason:
        pytest.skip(f"{reason}; a real network between hosts was not tried")
    with testbed.Hosts(4, rate="100mbit") as made:
        yield made


def preflight_of(hosts, *arguments):
    return hosts.mpirun(PROGRAM, "--preflight", "--model=260K", "--link=udp", "--interface=eth0",
                        *arguments)


def slow_port(hosts, i, rate):
    """What the switch sends to host i."""
    testbed.sh("tc", "-n", hosts.switch, "qdisc", "replace", "dev", f"p{i}", "root", "tbf", "rate",
               rate, "burst", testbed.BURST, "limit", "16mb")


def only(done, host, *texts):
    assert done.returncode == 1, done.stdout + done.stderr
    print(done.stdout)
    assert len(findings(done)) == 1, findings(done)
    (line,) = findings(done)
    assert line.startswith(f"node {host}: ") and line.endswith(": look at its port"), line
    for text in texts:
        assert text in line, line
    return line


def test_hosts_that_are_well(hosts, tmp_path):
    done = preflight_of(hosts, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well: 4 nodes, 4 ranks" in done.stdout
    assert all(name in done.stdout for name in hosts.names)


def test_a_slow_port_is_named(hosts):
    slow_port(hosts, 2, "50mbit")
    try:
        done = preflight_of(hosts)
    finally:
        hosts.limit(2)
    line = only(done, hosts.names[2], "% of the median rate from every peer")
    assert 30 <= int(line.split("received ")[1].split("%")[0]) <= 70, line


def test_a_lossy_port_is_named(hosts):
    hosts.execute(hosts.switch, "nft", "-f", "-", text="""
table netdev worn {
  chain in {
    type filter hook ingress device "p3" priority 0; policy accept;
    meta l4proto udp numgen random mod 100 < 6 drop
  }
}
""")
    try:
        done = preflight_of(hosts)
    finally:
        hosts.execute(hosts.switch, "nft", "delete", "table", "netdev", "worn")
    only(done, hosts.names[3], "of what it sent to every peer")


def test_a_pulled_plug_is_named(hosts):
    hosts.cut(1)
    try:
        done = preflight_of(hosts)
    finally:
        hosts.mend(1)
    only(done, hosts.names[1], "received nothing from any peer")


def test_no_shared_directory(hosts, tmp_path):
    """Host 3 has a directory of its own in the place of --out."""
    (tmp_path / "out").mkdir()
    (tmp_path / "own").mkdir()
    script = tmp_path / "start.sh"
    script.write_text(f"""#!/bin/sh
[ "$(hostname)" != {hosts.names[3]} ] || mount --bind {tmp_path}/own {tmp_path}/out
exec "$@"
""")
    script.chmod(0o755)
    done = hosts.mpirun("unshare", "--mount", script, PROGRAM, "--preflight", "--model=260K",
                        "--link=udp", "--interface=eth0", "--out", tmp_path / "out")
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(findings(done)) == 1, findings(done)
    (line,) = findings(done)
    assert line.startswith(f"node {hosts.names[3]}, rank 3: does not see in --out"), line
