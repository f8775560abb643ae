"""Tests scripts/time_to_accuracy.py: its hours are the sweep's steps times the step times of dev/scaling."""
import re
import subprocess
import sys

import pytest

from program import ROOT

pytest.importorskip("matplotlib")
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "dev" / "scaling")]
import scaling  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.quick

TABLE = """\
section,run,step_tax,tax_interval,dropped,phases,wire_dtype,extra_traffic,diverged
Steep: small,no loss,,,0.0,both,float32,0,0
Steep: small,20% gradient phase,0.1,0.1,20.0,gradient,float32,0.0,0
Steep: small,ours on gradients,0.1,0.1,20.0,gradient,float32,0.0,0
Steep: small,"20% gradient, 10% parameter phase",0.1,0.1,20.0,different,float32,0.0,0
Steep: small,the paper,0.25,0.1,20.0,both,float32,0.0,0
Steep: small,ours,0.0,,20.0,both,int6,0.2,0
Steep: small,"20%, no base",,,20.0,both,float32,0.2,0
Steep: small,"20%, one lost",0.1,,20.0,both,float32,0.2,1
Steep: small,"20%, never",1.0,,20.0,both,float32,0.2,0
Other,"40%, lead off",0.5,,40.0,both,float32,0.3,0
Unknown,"40%, lead off",,,40.0,both,float32,0.3,0
"""


def hours(path, *words):
    return subprocess.run([sys.executable, ROOT / "scripts" / "time_to_accuracy.py", path, *words], text=True,
                          capture_output=True, check=False)


def cells(text):
    """{(workers, name, Gbit/s): hours}"""
    found = {}
    for line in text.splitlines():
        if title := re.match(r"hours, (\d+) workers", line):
            workers = int(title[1])
        elif line.startswith("|  |"):
            links = [float(cell.split()[0]) for cell in line.strip("| ").split(" | ")]
        elif line.startswith("| ") and "---" not in line:
            name, *values = line.strip("| ").split(" | ")
            found.update({(workers, name, link): float(value.split(" ±")[0]) for link, value in zip(links, values)})
    return found


def test_hours(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE, encoding="utf-8-sig")  # as a spreadsheet writes it
    done = hours(path, "--section=Steep", "--links=1,100", "--workers=8", "--parameters=1e9", "--tokens=1e6", "--tflops=100",
                 f"--svg={tmp_path}/hours.svg")
    assert done.returncode == 0, done.stderr
    found = cells(done.stdout)
    assert len(found) == 2 * 6
    for link in (1, 100):
        net = scaling.Network(link, 10e-6, 0.2)
        compute, steps = 6 * 1e9 * 1e6 / (8 * 1e14), 20 * 1e9 / 1e6
        for name, exchange, tax in (("the paper", "lossy", 0.25), ("ours", "int8", 0)):
            seconds = scaling.exchange(exchange, net, 8, 2e9)
            assert found[8, name, link] == pytest.approx(steps / (1 - tax) * (compute + seconds) / 3600, rel=1e-3)
            assert not tax or f"± {steps * 0.1 / (1 - tax) ** 2 * (compute + seconds) / 3600:.2g}" in done.stdout
        seconds = scaling.reliable("tcp", net, 8, 2e9)
        assert found[8, "TCP, BBR", link] == pytest.approx(steps * scaling.step(seconds, compute) / 3600, rel=1e-3)
    assert "1e+09 parameters" in done.stdout
    assert done.stderr.startswith(  # on a slow machine Matplotlib warns behind it
        "time_to_accuracy.py: left out, since phases lose differently: 20% gradient phase; ours on gradients; "
        "20% gradient, 10% parameter phase\n"
        "time_to_accuracy.py: left out, without a known step tax: 20%, no base; 20%, one lost; 20%, never\n")
    assert (tmp_path / "hours.svg").read_text().count("the paper") >= 1


def test_loss_rates_and_models(tmp_path):
    """--loss chooses the rates, with opponents alone where no row has one; a sweep's folder stands for its table."""
    path = tmp_path / "table.csv"
    path.write_text(TABLE.splitlines()[0] + ",changes\nSteep,no loss,,,0.0,both,float32,0,0,\n"
                    "Steep,no loss in int8,,,0.0,both,int8,0,0,1.2\nSteep,20%,0.1,,20.0,both,int8,0,0,1.2\n")
    done = hours(tmp_path, "--section=Steep", "--links=100", "--workers=8", "--loss=0,0.01", "--model=13B")
    assert done.returncode == 0, done.stderr
    assert "no row loses 1%: opponents stand alone" in done.stderr and "step tax: no loss in int8" in done.stderr
    steps, seconds = 20 * 13.02e9 / 4e6, scaling.exchange("lossy", scaling.Network(100, 10e-6, 0), 8, 2 * 13.02e9)
    assert cells(done.stdout)[8, "no loss", 100] == pytest.approx(
        steps * (6 * 13.02e9 * 4e6 / (8 * 450e12) + seconds) / 3600, rel=1e-3)
    assert done.stdout.count("TCP, BBR") == 2 and (tmp_path / "hours.svg").exists()
    for words, says in (("--loss=0.05", "Steep...' loses as much: expected --loss of 0, 0.2"),
                        ("--loss=1", "expected numbers from 0 to below 1"), ("--model=8B", "invalid choice: '8B'")):
        done = hours(path, "--section=Steep", words)
        assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr


def test_rows_of_one_name_are_told_apart(tmp_path):
    """Without --section all sections count, and each has its own 20%."""
    path = tmp_path / "table.csv"
    path.write_text(TABLE.splitlines()[0] + "\nSteep,20%,0.5,,20.0,both,float32,0,0\nLong,20%,0.2,,20.0,both,float32,0,0\n")
    found = cells(hours(path, "--links=1", "--workers=8").stdout)
    assert found[8, "Steep: 20%", 1] / found[8, "Long: 20%", 1] == pytest.approx(0.8 / 0.5, rel=1e-2)
    assert found[8, "Long: 20%", 1] == cells(hours(path, "--links=1", "--workers=8", "--section=Long").stdout)[8, "20%", 1]


def test_wrong_use_gets_one_line(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    named = tmp_path / "named.csv"
    named.write_text(re.sub(r"[24]0\.0", "0.0", TABLE))
    (tmp_path / "broken.csv").write_text(TABLE.replace("0.25,0.1", "much,0.1"))
    (tmp_path / "cut.csv").write_text(TABLE[:TABLE.index(",20.0,both,int6")])
    (tmp_path / "binary.csv").write_bytes(b"\xff\x00\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for words, says in (((path, "--section=None"), "no row of a section 'None...' loses packets of both phases: expected one of: Other; Steep: small; Unknown"),
                        ((named,), "expected a sweep that loses some"),
                        ((tmp_path / "other.csv",), "expected a table.csv of"), ((tmp_path / "no",), "No such file"),
                        ((path, "--workers=1"), "at least 2 workers"),
                        ((path, "--tokens=nan"), "numbers above 0"), ((path, "--workers=8.5"), "at least 2 workers"),
                        ((tmp_path / "broken.csv",), "broken.csv: not as scripts/sweeps/sweep.py writes it"),
                        ((tmp_path / "cut.csv",), "cut.csv: not as scripts/sweeps/sweep.py writes it"),
                        ((tmp_path / "binary.csv",), "binary.csv: not as scripts/sweeps/sweep.py writes it"),
                        ((path, "--section=Unknown"), "no row of section 'Unknown...' has a step tax")):
        done = hours(*words)
        assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr
        assert done.stderr.count("\n") == 1 + done.stderr.count("left out"), done.stderr
