#!/usr/bin/env python3
"""Puts the loss traces of --record-loss in order for replay, and reports how bursty they are.

    scripts/loss_trace.py trace.0 trace.1 trace.2 trace.3 > trace      # in terms of links
    build/train_llama2 --loss-model trace:trace --loss-rate 1 ...

The input files are ordered by step. The output is ordered by link (sender, receiver, phase) and has
all steps of a link one after another, so that a burst that is longer than a step stays one burst.
The report goes to stderr.
"""
import argparse
import json
import re
import signal
import sys

TITLE = re.compile(r"# step (\d+), (gradient|parameter), worker (\d+) to (\d+)")


def read(paths):
    """Returns {(phase, sender, receiver): "0010..."}, where 1 is a lost packet. Links are sorted, and
    each has its packets from the first step to the last."""
    links, last = {}, {}
    for path in paths:
        link = None
        with open(path, encoding="ascii", errors="replace") as file:
            for number, line in enumerate(file, 1):
                title = TITLE.match(line)
                if title:
                    link, step = (title[2], int(title[3]), int(title[4])), int(title[1])
                    if step <= last.get(link, -1):
                        sys.exit(f"{path}, line {number}: step {step} of this link comes after step {last[link]}: "
                                 "expected each record once, in order of steps")
                    last[link] = step
                elif not line.startswith("#"):
                    if link is None or line.strip("01\n"):
                        sys.exit(f"{path}, line {number}: expected what --record-loss writes")
                    links.setdefault(link, []).append(line.strip())
    return {link: "".join(parts) for link, parts in sorted(links.items())}


def describe(links):
    """Statistics: the number of packets, the share that was lost, the mean length of a run of lost
    packets, and the mean length if losses of the same share were independent."""
    packets = sum(map(len, links.values()))
    lost = sum(digits.count("1") for digits in links.values())
    runs = sum(len(re.findall("1+", digits)) for digits in links.values())
    share = lost / packets if packets else 0
    return {"links": len(links), "packets": packets, "lost": lost, "share": share,
            "mean_run": lost / runs if runs else 0,
            "mean_run_if_independent": 1 / (1 - share) if share < 1 else None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="what --record-loss wrote, one per rank")
    try:
        links = read(parser.parse_args().files)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}; expected what --record-loss wrote")
    if not links:
        sys.exit("no file has packets: expected what --record-loss writes of several workers")
    for (phase, sender, receiver), digits in links.items():
        print(f"# {phase}, worker {sender} to {receiver}\n{digits}")
    print(json.dumps(describe(links)), file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main()
