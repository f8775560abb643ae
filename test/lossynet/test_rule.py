"""Tests lossynet.Rule: rules of dev/examples/rules.py give the numbers of their twins in C, over processes that lose
packets, and a rule that fails is told."""
import ctypes
import socket
import subprocess
import sys

import pytest

from huggingface import environment
from program import BUILD, ROOT, TIMEOUT, environment_of

np = pytest.importorskip("numpy")
pytestmark = [pytest.mark.takes(40)]

LIBRARY = BUILD / "liblossynet" / "liblossynet.so"
VECTORS = """
import sys, numpy as np, lossynet
sys.path.insert(0, "dev/examples")
import rules
def run(rule=None, **given):
    given = {"loss_rate": 0.3, "lead": "off", "carry": 0, "repair": 0, "wire_dtype": "float32", "packet_bytes": 256,
             "loss_seed": 7, **given}
    out = []
    with lossynet.Comm([5_000, 3_333], rule=rule, **given) as comm:
        value = np.zeros(8_333, np.float32)
        for step in range(25):
            gradient = np.random.default_rng([step, comm.rank]).standard_normal(8_333).astype(np.float32)
            comm.step_begin(step)
            comm.reduce(gradient)
            owned = comm.owned()
            squares = sum(float((gradient[part] ** 2).sum()) for part in owned)
            comm.norm = float(np.sqrt(comm.all_gather(np.array([squares])).sum()))
            for part in owned:
                value[part] -= gradient[part]
            comm.broadcast(value)
            counted = comm.counters(step)
            out.append((value.copy(), counted["lost"], [gradient[part].copy() for part in owned]))
    return out
def same(a, b, tolerance):
    for (x, lost, _), (y, other, _) in zip(a, b):
        assert lost == other, (lost, other)
        assert np.allclose(x, y, rtol=0, atol=tolerance), np.abs(x - y).max()
"""
SAME = VECTORS + """
plain = run(estimator="mean")
same(run(rules.Mean()), plain, 2e-5)
same(run(rules.ZeroFill()), run(estimator="zero"), 2e-5)
class Carried(lossynet.Rule):  # the library's mean with error feedback
    def average(self, part, gradients, arrived, carried):
        return gradients.sum(axis=0) / part.spread((arrived * (1 + carried)).sum(axis=0)).astype(np.float32)
same(run(Carried(), carry=1), run(carry=1), 1e-4)
early = run(rules.Phases())
lost = [step[1] for step in early]
assert lost[:19] == [[0, 0]] * 19 and lost[19][0] == 0 and lost[19][1] > 0.1 and min(lost[20]) > 0.1, lost
turned = run(rules.Hadamard())
assert [step[1] for step in turned] == [step[1] for step in plain]
whole = run(rules.Hadamard(), loss_rate=0)
same(whole, run(loss_rate=0), 2e-5)  # with nothing lost the transform changes nothing
holes = lambda steps: sum(np.abs(part).sum() == 0 for step in steps for part in step[2])
class Extrapolate(lossynet.Rule):  # what is old goes on as it went
    def receive(self, part, worker, values, age):
        assert worker != part.owner and values.shape == (part.count,) and age.shape == (part.packets,)
        self.oldest = max(getattr(self, "oldest", 0), int(age.max(initial=0)))
        values[part.spread(age) > 0] = 7
rule = Extrapolate()
seen = run(rule)
share = np.mean([(step[0] == 7).mean() for step in seen[1:]])
assert rule.oldest > 2 and 0.15 < share < 0.3, (rule.oldest, share)
print("same")
"""
FAILS = VECTORS + """
class Wrong(lossynet.Rule):
    def average(self, part, gradients, arrived, carried):
        if part.step == 3:
            return gradients.sum(axis=0)[1:]
        return gradients[0]
try:
    run(Wrong())
except ValueError as error:
    print("told", error)
class Returns(lossynet.Rule):
    def __init__(self, what):
        self.what = what
    def average(self, part, gradients, arrived, carried):
        return self.what(gradients)
for what in (lambda g: None, lambda g: g.mean(), lambda g: g[0][:1], lambda g: g, lambda g: g[0] * 1j, lambda g: "x"):
    try:
        run(Returns(what))
    except ValueError as error:
        print("returned", str(error).split("returned ")[1])
class Keeps(lossynet.Rule):  # what it keeps and changes of its arguments is its own
    kept = []
    def average(self, part, gradients, arrived, carried):
        average = gradients.sum(axis=0) / np.float32(part.workers)
        for array in (gradients, arrived, carried):
            array[:] = 1
        return average
    def receive(self, part, worker, values, age):
        self.kept.append((age, age.copy()))
        age[:] = 100
        self.kept[-1][1][:] = 100
assert all((a[0] == b[0]).all() and a[1] == b[1] for a, b in zip(run(Keeps()), run(rules.ZeroFill())))
assert all((kept == copy).all() for kept, copy in Keeps.kept) and Keeps.kept
own = rules.ZeroFill()
own.average = lambda part, gradients, arrived, carried: rules.Mean.average(own, part, gradients, arrived, carried)
same(run(own), run(rules.Mean()), 0)
class Exits(lossynet.Rule):
    def average(self, part, gradients, arrived, carried):
        sys.exit(0)
class ExitsBefore(lossynet.Rule):
    def reliable(self, phase, step, steps, norm):
        sys.exit(0)
for rule in Exits(), ExitsBefore():
    try:
        run(rule)
    except RuntimeError as error:
        print("ended", error)
class Differs(lossynet.Rule):
    def reliable(self, phase, step, steps, norm):
        return phase == lossynet.PARAMETER and step == 2 and lossynet.comm.Place.of().rank == 0
try:
    run(Differs())
except lossynet.LossynetError as error:
    print("differ", error)
class Typo(lossynet.Rule):
    def averge(self, part, gradients, arrived, carried):
        return gradients[0]
for given, expected in (({"rule": rules.Mean}, TypeError), ({"rule": Typo()}, TypeError), ({"rule": rules.Hadamard(), "carry": 1}, lossynet.LossynetError)):
    try:
        lossynet.Comm(100, rank=0, ranks=1, **given)
    except expected as error:
        print("refused", error)
"""


def ranks(text, count, python=sys.executable):
    if not LIBRARY.exists():
        pytest.skip("this build has no liblossynet.so")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"PYTHONPATH": str(ROOT / "lossynet" / "python"), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
              "LOSSYNET_PORT": str(port), "LOSSYNET_LIBRARY": str(LIBRARY), "OMP_NUM_THREADS": "1",
              "PYTHONDONTWRITEBYTECODE": "1"}
    started = [subprocess.Popen([python, "-c", text], text=True, cwd=ROOT, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, env=environment_of({**common, "RANK": str(rank)}))
               for rank in range(count)]
    return [(*rank.communicate(timeout=TIMEOUT), rank.returncode) for rank in started]


def test_rules_give_the_numbers_of_c():
    for output, errors, code in ranks(SAME, 3):
        assert code == 0 and output == "same\n", output + errors


def test_a_rule_that_fails_is_told():
    """An exception cannot pass through the library, and must not be swallowed: the call raises it."""
    output, errors, _ = ranks(FAILS, 2)[0]
    assert "told lossynet: Wrong.average returned float32 of the shape" in output, output + errors
    for what in ("None", "float32 of the shape ()", "float32 of the shape (1,)", "float32 of the shape (2, ",
                 "complex64 of the shape (", "<U1 of the shape ()"):
        assert f"returned {what}" in output, output + errors
    for name in "Exits", "ExitsBefore":
        assert f"ended lossynet: {name} called exit(): expected" in output, output + errors
    assert "differ lossynet: ranks make different calls: rank 0 in reliable() = True of step 2; rank 1 in" in output, output
    assert "expected one of the methods send, average, receive, reliable" in output, output + errors
    assert "expected an object of a subclass of lossynet.Rule" in output
    assert "rule: expected carry 0" in output


def test_hadamard_is_that_of_c(tmp_path, monkeypatch):
    """The transform of rules.py and of scripts/sweeps/others/hadamard.c, element by element."""
    if not LIBRARY.exists():
        pytest.skip("this build has no liblossynet.so")
    monkeypatch.setenv("LOSSYNET_LIBRARY", str(LIBRARY))
    for folder in ("lossynet/python", "dev/examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    from lossynet.rule import Functions, Part
    import rules
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", f"-I{ROOT}", f"-I{ROOT}/lossynet",
                    str(ROOT / "scripts/sweeps/others/hadamard.c"), "-o", str(tmp_path / "h.so"), "-lm"], check=True)
    twin = Functions.in_dll(ctypes.CDLL(str(tmp_path / "h.so")), "lossynet_rule")
    for count, offset, step in ((1, 0, 0), (8, 9, 1), (64, 128, 3), (1000, 77, 12), (4096, 5, 9), (9000, 3, 2)):
        ours = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        theirs, before = ours.copy(), ours.copy()
        part = Part(step, 4, 1, 0, offset, count, 256, -(-count // 256))
        rules.Hadamard().send(part, 0, ours)
        twin.send(None, ctypes.byref(part), 0, theirs.ctypes.data)
        assert np.allclose(ours, theirs, rtol=0, atol=3e-6) and (count == 1 or not np.allclose(ours, before, atol=0.1))
        rules.Hadamard().turn(part, ours, True)
        assert np.allclose(ours, before, rtol=0, atol=3e-6)


TORCH = """
import sys, torch, lossynet, lossynet.torch
sys.path.insert(0, "dev/examples")
import rules
class Counts(rules.ZeroFill):
    parts = 0
    def average(self, part, gradients, arrived, carried):
        self.parts += 1
        return super().average(part, gradients, arrived, carried)
def train(**given):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    plain = dict(loss_rate=0.3, carry=0, repair=0, lead="off", packet_bytes=512, wire_dtype="float32")
    optimizer = lossynet.torch.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, bucket_mb=0.05, **{**plain, **given})
    torch.manual_seed(optimizer.comm.rank)
    losses = []
    for step in range(25):
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    report = optimizer.report()
    optimizer.close()
    return losses, report
rule = Counts()
ours, theirs = train(rule=rule), train(estimator="zero")
assert rule.parts >= 50 and torch.allclose(torch.tensor(ours[0]), torch.tensor(theirs[0]), rtol=1e-4)
assert ours[1]["lost"] == theirs[1]["lost"]
phases = train(rule=rules.Phases())[1]
assert max(phases["lost"]) > 0.1
turned = train(rule=rules.Hadamard())[0]
assert abs(turned[-1] - ours[0][-1]) < 0.5
first = train(loss_rate=0, loss_at="0.weight=1:0", rule=None)[1]
assert 0.7 < first["lost"][0] < 0.95 and first["lost"][1] == 0, first["lost"]
print("same")
"""


def test_a_rule_trains_a_model():
    for output, errors, code in ranks(TORCH, 2, environment()):
        assert code == 0 and output == "same\n", output + errors


MISUSED = """
import numpy as np, lossynet
def told(what, function, *given, **keywords):
    try:
        function(*given, **keywords)
    except (ValueError, lossynet.LossynetError) as error:
        print(what, error)
told("shards", lossynet.Comm, [10, 10], rank=0, ranks=1, shards=[[10]])
with lossynet.Comm(1000) as comm:
    one, other = np.ones(1000, np.float32), np.ones(1000, np.float32)
    fixed = np.frombuffer(bytes(4000), np.float32)
    comm.step_begin(7)
    told("fixed", comm.reduce, fixed)
    comm.reduce_begin(one)
    told("other", comm.reduce, other)
    comm.reduce(one)
    comm.broadcast(one)
    told("counters", comm.counters, 6)
    assert comm.counters(7)["expected"][0] > 0
    told("gather", comm.all_gather, np.array([comm.rank, 1], (np.int64, np.float64)[comm.rank]))
    assert comm.all_gather(np.array([comm.rank])).ravel().tolist() == [0, 1]
"""


def test_what_would_give_wrong_numbers_is_told():
    for output, errors, code in ranks(MISUSED, 2):
        said = dict(line.split(" ", 1) for line in output.splitlines())
        assert code == 0 and list(said) == ["shards", "fixed", "other", "counters", "gather"], output + errors
        assert "expected a list of 2 buckets" in said["shards"] and said["fixed"].endswith("that is read-only")
        assert "expected the same" in said["other"] and "the one before, 7" in said["counters"]
        assert "all_gather() of int64 (2,)" in said["gather"] and "all_gather() of float64 (2,)" in said["gather"]


def test_a_launcher_that_sets_other_variables_is_told():
    """Each process would train alone."""
    if not LIBRARY.exists():
        pytest.skip("this build has no liblossynet.so")
    code = "import lossynet; lossynet.Comm(10)"
    environment_ = {"PYTHONPATH": str(ROOT / "lossynet" / "python"), "LOSSYNET_LIBRARY": str(LIBRARY)}
    for count, expected in ("4", 1), ("1", 0):
        done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False,
                              env=environment_of({**environment_, "OMPI_COMM_WORLD_SIZE": count}))
        assert done.returncode == expected and ("OMPI_COMM_WORLD_SIZE=4" in done.stderr) == bool(expected), done.stderr
