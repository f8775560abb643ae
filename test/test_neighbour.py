"""--traffic-class: DATA in a class of its own, whose queues other traffic goes before."""
import pytest

from program import PROGRAM, run
from test_program import data, numbers, settings, weights  # pylint: disable=unused-import
from test_udp import (NETWORK, hosts, namespaces,  # pylint: disable=unused-import
                      one_line, options, reference, results, testbed, total, train_on)


@pytest.mark.parametrize("name", ["low", "le2", "cs8", "af44", "af1", "64", "-1", "1.5"])
def test_no_such_class(data, tmp_path, name):
    line = one_line(run(*settings(data, tmp_path), f"--traffic-class={name}"), 2)
    assert "--traffic-class: expected default, le, cs0 to cs7" in line and f"'{name}'" in line


@pytest.mark.parametrize("ipv, name, dscp", [(4, "le", 1), (6, "le", 1), (4, "af13", 14),
                                             (6, "40", 40)])
def test_marks_on_the_wire(namespaces, data, tmp_path, ipv, name, dscp):
    """All DATA is marked, control is not but for the few that count on coming behind DATA; and the
    model is the one of a network without classes."""
    changes = {"loss_rate": 0.1, "steps": 10, "packet_bytes": 1400}
    with testbed.Hosts(4, ipv=ipv) as made:
        made.watch_marks(dscp)
        log = train_on(made, data, tmp_path / "udp", traffic_class=name, **changes)
        seen = made.counted()
    print(seen)
    assert seen["data"] == seen["data_marked"] > 5000
    assert 0 < seen["control_marked"] < seen["control"] / 3
    assert results(log) == results(reference(data, tmp_path / "mpi", **changes))


def test_default_class_marks_nothing(hosts, data, tmp_path):
    hosts.watch_marks(1)
    train_on(hosts, data, tmp_path, steps=5)
    seen = hosts.counted()
    assert seen["data"] > 1000 and seen["data_marked"] == seen["control_marked"] == 0


def test_control_that_overtakes_ends_no_phase(namespaces, data, tmp_path):
    """DATA waits in a slow queue that control passes by: it is waited for, nothing is late or
    lost, and the bits are those of a link that loses nothing."""
    changes = {"loss_rate": 0.1, "steps": 8, "packet_bytes": 1400}
    with testbed.Hosts(4, rate="1gbit") as made:
        made.yield_to_others(1, queue="8mb", rate="30mbit", host_queue="8mb")
        log = train_on(made, data, tmp_path / "udp", traffic_class="le", **changes)
        assert made.overflowed() == 0
    print([{name: event[name] for name in NETWORK} for event in log if event["event"] == "step"])
    assert total(log, "late") == 0
    assert results(log) == results(reference(data, tmp_path / "mpi", **changes))
    assert weights(tmp_path / "udp") == weights(tmp_path / "mpi")
