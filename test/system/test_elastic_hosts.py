"""Tests --meet when the network is cut: ranks are in network namespaces, and etcd has its own host."""
import json
import pathlib
import sys

import pytest

from etcd import Etcd
from program import ROOT
from test_elastic import FOREVER, Ranks
from test_program import data  # pylint: disable=unused-import
from test_udp import namespaces  # pylint: disable=unused-import

sys.path.insert(0, str(ROOT / "dev" / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.takes(40)

RANKS, STORE = 4, 4  # process i is on host i, etcd on host 4


@pytest.fixture(scope="module")
def hosts(namespaces):  # pylint: disable=unused-argument
    with testbed.Hosts(RANKS + 1) as made:
        yield made


@pytest.fixture(scope="module")
def etcd(hosts, tmp_path_factory):
    store = Etcd(tmp_path_factory.mktemp("etcd"), hosts.address(STORE), hosts.shell(STORE))
    yield store
    store.stop()


class RanksOnHosts(Ranks):
    """Ranks on hosts. Each process has its own log, which shows whether it trains and believes to be
    rank 0."""

    def __init__(self, hosts, data, out, url, **changes):
        self.hosts = hosts
        super().__init__(data, out, url, RANKS, interface="eth0", steps=FOREVER, **changes)

    def words(self, i):
        return self.hosts.shell(i), [f"--log={self.said}.log.{i}"]

    def log(self):
        """The steps and views in the logs of all processes, in order."""
        events = [e for i in range(len(self.process)) for e in self.log_of(i)]
        return sorted(events, key=lambda e: (e.get("step", 0), e.get("view", 0)))

    def log_of(self, i):
        path = pathlib.Path(f"{self.said}.log.{i}")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps_of(self, some):
        return max((e["step"] + 1 for i in some for e in self.log_of(i) if e["event"] == "step"),
                   default=0)


@pytest.fixture
def ranks(hosts, etcd, data, tmp_path):
    made = RanksOnHosts(hosts, data, tmp_path / "out", etcd.url(tmp_path.name))
    yield made
    hosts.unite()
    made.kill()


def goes_on_alone(ranks, some):
    """Waits until only the processes `some` train. Returns the number of their steps."""
    others = [i for i in range(RANKS) if i not in some]
    ranks.wait(lambda: ranks.views()[-1]["ranks"] == len(some))
    ranks.wait_steps(5)
    stopped = ranks.steps_of(others)
    ranks.wait_steps(20)
    assert ranks.steps_of(others) == stopped
    return ranks.steps()


def all_again(ranks):
    ranks.wait(lambda: ranks.views()[-1]["ranks"] == RANKS)
    ranks.wait_steps(5)
    ranks.end()
    views = [e for e in ranks.log() if e["event"] == "view"]
    assert len({v["view"] for v in views}) == len(views)  # no view is begun twice
    steps = {e["step"] for e in ranks.log() if e["event"] == "step"}
    assert steps == set(range(len(steps)))


@pytest.mark.parametrize("living", [[0, 1], [2]], ids=["2-2", "1-3"])
def test_the_side_with_the_store_goes_on(hosts, ranks, living):
    """If the network is cut in two, the side that reaches the store goes on, however small it is. The other
    side waits, and says so."""
    ranks.wait_steps(5)
    others = [i for i in range(RANKS) if i not in living]
    hosts.part(living + [STORE], others)
    ranks.wait(lambda: all("stands still until it does" in ranks.said_by(i) for i in others))
    goes_on_alone(ranks, living)
    hosts.unite()
    all_again(ranks)


@pytest.mark.parametrize("one", [[0, 1], [1]], ids=["2-2", "1-3"])
def test_one_side_goes_on_where_both_have_the_store(hosts, ranks, one):
    """If both sides reach the store, the larger one goes on, or one of two halves. The other waits."""
    ranks.wait_steps(5)
    others = [i for i in range(RANKS) if i not in one]
    hosts.part(one, others)
    ranks.wait(lambda: ranks.views()[-1]["ranks"] == len(others))
    ranks.wait_steps(5)
    living = one if ranks.steps_of(one) > ranks.steps_of(others) else others
    assert len(living) == len(others)
    left = [i for i in range(RANKS) if i not in living]
    ranks.wait(lambda: all("waits to join" in ranks.said_by(i) for i in left))
    goes_on_alone(ranks, living)
    hosts.unite()
    all_again(ranks)


def test_a_firewall_that_lets_one_range_pass(hosts, etcd, data, tmp_path):
    """Ranks meet and train through a firewall that lets --port-range pass and the etcd's port, also after one has
    died and another has come. The etcd is on a host of the same range."""
    first = etcd.port - 8 if etcd.port > 2000 else etcd.port
    span = f"{first}-{first + 16}"
    hosts.firewall(span)
    ranks = RanksOnHosts(hosts, data, tmp_path / "out", etcd.url(tmp_path.name), port_range=span)
    try:
        ranks.wait_steps(10)
        ranks.process[1].kill()
        ranks.wait(lambda: ranks.views()[-1]["ranks"] == RANKS - 1)
        ranks.wait_steps(5)
        ranks.end()
        assert all((e["gradient_loss_rate"] or 0) < 0.6 for e in ranks.log() if e["event"] == "step")
    finally:
        hosts.firewall(None)
        ranks.kill()


def test_a_link_that_loses_everything_one_way(hosts, ranks):
    """If datagrams from one rank to another are all lost, they go by way of a third rank. Nobody is left
    out."""
    ranks.wait_steps(5)
    hosts.part([1], [2], both=False)
    ranks.wait(lambda: any(e.get("relayed") for e in ranks.log()))
    ranks.wait_steps(20)
    hosts.unite()
    all_again(ranks)
    assert [e["ranks"] for e in ranks.log() if e["event"] == "view"] == [RANKS]
