"""Tests --meet on hosts that have IPv6 alone. (A file of its own: test_elastic_hosts.py has hosts with IPv4.)"""
from etcd import Etcd
from test_elastic_hosts import RANKS, STORE, RanksOnHosts, testbed
from test_program import data  # pylint: disable=unused-import
from test_udp import namespaces  # pylint: disable=unused-import


def test_ipv6_alone(namespaces, data, tmp_path):  # pylint: disable=unused-argument
    """Ranks meet and train where no host has an IPv4 address. A rank dies meanwhile."""
    with testbed.Hosts(RANKS + 1, ipv=6) as hosts:
        store = Etcd(tmp_path, f"[{hosts.address(STORE)}]", hosts.shell(STORE))
        made = RanksOnHosts(hosts, data, tmp_path / "out", store.url("six"))
        try:
            made.wait_steps(5)
            made.process[1].kill()
            made.wait(lambda: made.views()[-1]["ranks"] == RANKS - 1)
            made.wait_steps(5)
            made.end()
        finally:
            made.kill()
            store.stop()
