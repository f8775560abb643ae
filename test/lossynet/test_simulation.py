"""Tests what a step costs by round trip and loss, and what late ranks cost the others. Times are virtual
(dev/simulation), so results depend only on the program."""
import re
import subprocess

import pytest

from program import BUILD, ROOT, TIMEOUT

pytestmark = pytest.mark.takes(60)


def simulate(round_trip, lost, queue=1024, ranks=4, packet=256, rule="plain"):
    command = [BUILD / "round_trips", round_trip, lost, queue, ranks, packet, rule]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT,
                          check=True)
    words = done.stdout.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2])}


@pytest.mark.parametrize("round_trip,lost,control,step_ms", [
    (2e-4, 0.0, 18, 0.9), (2e-4, 0.1, 22, 3.2),
    (1e-2, 0.0, 40, 26), (1e-2, 0.1, 40, 45),
    (1e-1, 0.0, 40, 252), (1e-1, 0.1, 40, 330),
])
def test_control_datagrams(round_trip, lost, control, step_ms):
    """Limits the control datagrams per peer and step, and the time of a step. A message is repeated at most once
    before its answer can have arrived. A step has two phases and two exchanges, and waits for five one-way trips.
    At 10% loss it waits less than two round trips more."""
    got = simulate(round_trip, lost)
    assert got["control"] <= control and got["step_ms"] <= step_ms, got


@pytest.mark.parametrize("said,arguments", [
    (r"ranks takes ([\d.]+) ms at 0\.2 ms", (2e-4, 0)), (r"At 100 ms it takes (\d+) ms", (0.1, 0)),
    (r"with 10% lost (\d+) ms", (0.1, 0.1)), (r"plain takes (\d+) ms", (0.1, 0.2, 1024, 4, 1024)),
    (r"the default (\d+)", (0.1, 0.2, 1024, 4, 1024, "rule")),
])
def test_the_page_says_what_steps_take_today(said, arguments):
    page = " ".join((ROOT / "dev/bench/network/round_trips.md").read_text(encoding="utf-8").split())
    assert simulate(*arguments)["step_ms"] == pytest.approx(float(re.search(said, page)[1]), rel=0.02)


@pytest.mark.parametrize("lost,trips", [(0.0, 0), (0.01, 0), (0.08, 2.5)])
def test_the_rule_takes_no_trip_where_little_is_lost(lost, trips):
    """What arrived is told with the norm, and there is no round of retransmission below 1/15: a step over a path of
    100 ms takes as long as a plain one, to within half a datagram. At 8% a round takes its trips, and those of its
    lost messages. At 10% a second round may be made, as what was measured has it."""
    plain, rule = (simulate(0.1, lost, packet=1024, rule=rule) for rule in ("plain", "rule"))
    assert plain["step_ms"] <= rule["step_ms"] + 0.5, (plain, rule)
    assert rule["step_ms"] <= plain["step_ms"] + 100 * trips + 0.5, (plain, rule)
    assert rule["control"] <= plain["control"] + (1 if trips == 0 else 16), (plain, rule)


def test_many_ranks():
    """With 16 ranks, some always lack a datagram. No rank waits longer for it than one or two retransmission
    time-outs."""
    got = simulate(2e-4, 0.1, ranks=16)
    assert got["control"] <= 22 and got["step_ms"] <= 8, got


def test_a_lost_message():
    """A lost message costs one retransmission time-out of 0.3 ms, and some turns of the progress engine."""
    got = simulate(2e-4, 0)
    assert 0.1 < got["lost_message_ms"] <= 0.6, got


def test_others_are_sent_to():
    """If a rank is late for a phase, or stops, the others still send to each other."""
    got = simulate(2e-4, 0, queue=48)
    assert got["beside_late_ms"] <= 50 and got["beside_stopped_ms"] <= 150, got


def long_path(round_trip, queue, mib=32, ranks=4):
    command = [str(BUILD / "long_path"), str(round_trip), "1", str(queue), str(mib), str(ranks)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT, check=True)
    words = done.stdout.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2])}, done.stderr


@pytest.mark.parametrize("round_trip,busy,queue", [(2e-4, 0.98, 12), (1e-2, 0.94, 12), (1e-1, 0.85, 15)])
def test_windows_follow_the_path(round_trip, busy, queue):
    """Links of 1 Gbit/s stay busy if receive buffers are as large as the path's bandwidth-delay product. On
    short paths, this does not make queues longer. Packets that are still on their way are not taken for lost."""
    got, said = long_path(round_trip, 33825)
    assert got["busy"] >= busy and got["queue_ms"] <= queue, got
    assert not said


def test_a_small_receive_buffer_on_a_long_path():
    """A rank prints at most one line, which says what the small buffer costs and what to set."""
    got, said = long_path(1e-1, 4226)
    assert got["busy"] < 0.4 and 1 <= said.count("receive buffer has room for 704 packets") <= 2, (got, said)
    assert "leaves at most 85" in said and "32 MiB on each host: as root, sysctl -w net.core.rmem_max=33554432" in said, said


def late_ranks(ranks, what, deadline, seed=1, carry=True, repair=False, lost=0):
    """64 ranks have few steps, since packets go by the square of the ranks."""
    command = [str(BUILD / "late_ranks"), str(ranks), what, deadline, str(seed), f"lost={lost}"]
    command += ["steps=40"] * (ranks == 64)
    command += ["carry"] * carry + ["repair"] * repair
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT, check=True)
    words = done.stdout.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2])}


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("what", ["even", "spread"])
def test_ordinary_ranks_are_waited_for(ranks, what):
    assert late_ranks(ranks, what, "auto")["lost"] <= 0.001


def test_without_a_deadline_nothing_is_lost():
    got = late_ranks(4, "tail", "off", carry=False)
    assert got["lost"] == 0 and got["left_out"] == 0 and got["mean"] >= 1.6, got


@pytest.mark.parametrize("ranks,repair,mean,pace,delay", [
    (4, False, 1.2, 0.85, 0.6), (16, False, 1.3, 0.8, 0.8), (64, False, 1.3, 0.77, 0.8),
    (4, True, 1.25, 0.8, 0.6), (16, True, 1.35, 0.74, 0.8)])
def test_a_tail_of_computing_times(ranks, repair, mean, pace, delay):
    """A step that waits for all 4, 16 or 64 ranks takes 1.75, 2.4 and 3.0 times the median compute time. With a
    deadline it is much faster. A late gradient is averaged in the next step, because the others ask late ranks
    for it. Without that, 1.5 to 2.3 steps would lie between a gradient and its average."""
    got = late_ranks(ranks, "tail", "auto", repair=repair)
    assert got["mean"] <= mean and got["pace"] >= pace and got["lost"] <= 0.02, got
    assert got["delay"] <= delay, got


@pytest.mark.parametrize("repair", [False, True])
def test_late_ranks_answer_over_a_network_that_loses(repair):
    got = late_ranks(4, "tail", "auto", lost=0.1, repair=repair)
    assert got["mean"] <= 1.25 and got["lost"] <= 0.02 and got["delay"] <= 0.75 and got["uncounted"] == 0, got


def test_late_data_do_not_lengthen_the_deadline():
    """The time at which late data arrive does not show how long datagrams travel, so it must not count."""
    assert late_ranks(16, "tail", "0.01")["mean"] <= 1.22


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("carry,repair", [(False, False), (True, False), (True, True)])
def test_a_rank_that_stops(ranks, carry, repair):
    """A rank stops for a tenth of the time. The others go on, even in rounds of retransmission, and the rank
    takes part again soon after."""
    got = late_ranks(ranks, "stop", "auto", carry=carry, repair=repair)
    assert got["p99"] <= 1.3 * got["p50"] and got["pace"] >= 0.97, got
    assert got["idle"] + got["left_out"] <= 0.13 / ranks, got


@pytest.mark.parametrize("repair", [False, True])
def test_a_slow_rank(repair):
    """The others go on without waiting, as fast as without the slow rank, and all its gradients count."""
    got = late_ranks(4, "slow", "auto", repair=repair)
    assert got["pace"] >= 0.9 and got["p50"] <= 1.05 and got["lost"] <= 0.01, got


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("repair", [False, True])
def test_random_stops_and_loss(carry, repair):
    """Every run ends, and late_ranks itself checks that all ranks end at the same step. With carry every gradient
    counts exactly once."""
    for seed in range(1, 4):
        got = late_ranks(4, "random", "auto", seed, carry, repair)
        assert got["steps"] >= 400 and (not carry or got["uncounted"] == 0), got


def bad_paths(what, seed=1, timeout=4):
    command = [str(BUILD / "bad_paths"), what, str(seed), str(timeout)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT, check=True)
    words = done.stdout.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2])}, done.stderr


def dark_links(ranks, share, seed=1, compute=0.2):
    """What dark_links prints, and the shares of gradients and parameters that were lost."""
    command = [str(BUILD / "dark_links"), str(ranks), str(share), str(compute), str(seed)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=TIMEOUT, check=True)
    words = done.stdout.split()
    second = words.pop(words.index("lost") + 2)
    numbers = {name: float(value) for name, value in zip(words[::2], words[1::2])}
    return numbers, [numbers.pop("lost"), float(second)]


# The peer time-out of bad_paths, in seconds.
BAD_PATHS_TIMEOUT = 4


@pytest.mark.parametrize("what", ["hole", "hole-packets"])
def test_a_path_begins_to_drop_large_datagrams(what):
    """The ranks at the path's ends say so within the peer time-out, and end."""
    got, said = bad_paths(what)
    assert got["failed"] == 4 and got["seconds"] < BAD_PATHS_TIMEOUT, got
    assert "rank 1 gets no datagram with 1400 bytes from rank 0 any more, and all small ones" in said, said


def test_what_is_no_path_that_drops_large_datagrams():
    """A path that recovers, heavy loss, and a filter that drops DATA alone. The filter gets one line per rank."""
    for what in ("hole-back", "lossy", "hole-data"):
        got, said = bad_paths(what)
        assert got["failed"] == 0 and got["after"] > 20, got
        lines = said.splitlines()
        assert len(lines) == (2 if what == "hole-data" else 0), said
        assert all("is there a filter on the path?" in line for line in lines), said


def test_a_path_that_drops_everything_is_gone_around():
    """Between two ranks, in one direction, and between two others every second. Where it stays so, nothing is lost
    any more, and steps take as long as before but for a hop. One line per rank says so."""
    before, _ = bad_paths("none")
    for what in ("dark", "dark-way"):
        got, said = bad_paths(what)
        assert got["failed"] == 0 and got["lost"] == 0 and got["step_ms"] < 1.1 * before["step_ms"], (got, before)
        assert 1 <= len(said.splitlines()) <= 2 and "by way of rank" in said, said
    got, _ = bad_paths("dark-switched")
    assert got["failed"] == 0 and got["lost"] < 0.1 and got["step_ms"] < 2 * before["step_ms"], (got, before)


@pytest.mark.parametrize("timeout", [1, 4, 60])
def test_a_way_is_found_after_a_standstill(timeout):
    """A direction goes dark with any datagram of an exchange, and all ranks stop at that moment for 3 s, which is no
    round trip. The others may need nothing of the two, and say nothing, but must help. The search takes 0.4 s."""
    for number in range(39, 49):
        got, said = bad_paths("dark-frozen", number, timeout)
        assert got["failed"] == 0 and got["steps"] > 775 and got["after"] > 90, (number, got, said)


def test_a_relay_goes_dark_on_a_long_path():
    """Over a round trip of 400 ms: that the direct way is tried again each second does not end the search."""
    got, said = bad_paths("dark-relay", timeout=60)
    assert got["failed"] == 0 and got["after"] > 0, (got, said)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_way_leads_there_and_back(seed):
    """Two hosts reach each other only by way of one host in one direction, and of another one in the other."""
    got, said = bad_paths("dark-corners", seed)
    assert got["failed"] == 0 and got["after"] > 80 and got["lost"] == 0, (got, said)


def test_many_ranks_while_links_are_down():
    """A hundredth of the links is down, each for 10 s. A step waits until new ones are noticed, most wait for none;
    hardly anything is lost or old, and a second hop adds few bytes."""
    none, some = ({**numbers, "lost": lost} for numbers, lost in (dark_links(16, share) for share in (0, 0.01)))
    assert none["lost"] == [0, 0] and none["relayed"] == none["oldest"] == 0
    assert some["relayed"] > 0.005 and max(some["lost"]) < 0.002 and some["oldest"] <= 2 and some["age999"] <= 1, some
    assert some["p50_ms"] < 3 * none["p50_ms"] and some["longest_ms"] < 300 and some["mbytes"] < 1.1 * none["mbytes"], some


@pytest.mark.parametrize("seed", [3, 8])
def test_many_links_are_down_at_once(seed):
    """A tenth of the links between 32 ranks: ranks wait for many others, of which most only wait, and for relays that
    are dark themselves. No search lasts, and only the directions that are dark take a second hop."""
    got, lost = dark_links(32, 0.1, seed)
    assert got["steps"] > 30 and got["longest_ms"] < 1000 and max(lost) < 0.01, (got, lost)
    assert got["relayed"] < 0.14, got


def test_searches_do_not_wait_for_ranks_that_only_wait():
    """Of many ranks, most wait for the few that search another way. They say nothing new, but slow no search down, and
    what was lost on a dark link leaves at once on the new way."""
    got, _ = dark_links(96, 0.02, compute=0.5)
    assert got["mean_ms"] < 220, got


def test_a_forged_leave():
    """A LEAVE in the name of a rank that goes on changes nothing. A rank that leaves is missed soon."""
    for what in ("leave", "leaves"):
        got, said = bad_paths(what)
        assert got["failed"] == 0 and got["after"] > 90 and not said, (got, said)
    got, said = bad_paths("left")
    assert got["failed"] == 4 and got["seconds"] < 1.5 and "peer rank 1 has left the run" in said, (got, said)


@pytest.mark.parametrize("seed", [1, 3])
def test_all_ranks_are_frozen_together(seed):
    """A rank that was stopped itself does not blame the others for that time."""
    got, said = bad_paths("frozen", seed)
    assert got["failed"] == 0 and got["after"] > 90, (got, said)


def test_numbers_of_phases_wrap_around():
    """Phases are counted with 32 bits, and in DATA with 24. Nothing is lost where these numbers wrap around."""
    got, said = bad_paths("wrap")
    assert got["failed"] == 0 and got["after"] > 90 and got["lost"] == 0 and not said, (got, said)


def test_ranks_that_wait_sleep():
    """A rank that waits for a stopped one wakes seldom, and still notices its end in time."""
    got, _ = bad_paths("stopped")
    assert got["failed"] == 0 and got["wakes"] < 3500, got
    got, said = bad_paths("dead")
    assert got["failed"] == 4 and got["seconds"] < 1.05 * BAD_PATHS_TIMEOUT, got
    assert "peer rank 1 was not heard for 4.0 s" in said, said


@pytest.mark.parametrize("what,lost", [("jitter", 0.002), ("jitter-short", 0.005), ("jitter-long", 0.02)])
def test_jitter_is_not_loss(what, lost):
    """Ranks learn how far datagrams overtake each other, and wait for those that were overtaken."""
    got, _ = bad_paths(what)
    assert got["failed"] == 0 and got["lost"] <= lost, got


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("carry", [False, True])
def test_a_stop_beside_short_steps(seed, carry):
    """No step of the others takes longer than 5 medians or 0.1 s, and few wait for a stop at all. What a real
    machine adds is left: its steps differ, and it averages and sends after the wait."""
    command = [str(BUILD / "late_ranks"), "4", "stop", "auto", str(seed), "compute=0.02", "steps=1000"]
    done = subprocess.run(command + ["carry"] * carry, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT,
                          check=True)
    words = done.stdout.split()
    got = {name: float(value) for name, value in zip(words[::2], words[1::2])}
    assert got["longest"] <= 4.4 and got["pace"] >= 0.95, got
