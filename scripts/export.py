#!/usr/bin/env python3
"""Writes a run's log for TensorBoard, Weights & Biases or a spreadsheet, also
while the run goes on.

    scripts/export.py RUN --tensorboard DIR [--follow]   for its --logdir DIR
    scripts/export.py RUN --wandb PROJECT [--follow]     a run of its name
    scripts/export.py RUN --csv FILE                     a row per step

RUN is the directory that the run got with --out. --follow goes on until the
run has ended. The packages tensorboard and wandb write their own formats; they
come from the environment that is active, or from the system's Python. Names
are train/FIELD and validation/FIELD, with the fields of llmc/log/README.md.
Steps count from 1, and a validation stands at the step that it follows.

Exit codes: 0 success, 1 failure, 2 wrong usage.
"""
import argparse
import csv
import json
import os
import pathlib
import signal
import sys
import time

from python_packages import require
from run_log import LogError, number, of_one_run, parse

PAUSE = 1.0  # seconds between looks at a log that grows


# ---- reading ----

def read_events(path, follow):
    """Yields the events of a log; with `follow` until one of them is the run's end. While the run goes on,
    the last line may be incomplete. A log that a resumed run has cut back is read again from its start."""
    lines, position = 0, 0
    while True:
        if os.path.getsize(path) < position:
            lines, position = 0, 0
        with open(path, "rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                lines, position = lines + 1, position + len(line)
                event = parse(path, lines, line)
                yield event
                follow = follow and event["event"] != "end"
        if not follow:
            return
        time.sleep(PAUSE)


def once(events):
    """Leaves out the steps that a resumed run repeats. They come again with the same numbers. Steps then count from 1,
    as on the terminal."""
    last = {}
    for event in events:
        if event["event"] in ("step", "eval", "sample"):
            if number(event, "step", -1) <= last.get(event["event"], -1):
                continue
            last[event["event"]] = event["step"]
        yield {**event, "step": event["step"] + 1} if event["event"] == "step" else event
    if not last:
        raise LogError("the log has no step yet: expected a run that has begun to train")


def scalars(event):
    """The numbers of a step or an evaluation, by name. Those that have no meaning (null) are left out."""
    for name in event:
        if name != "step" and number(event, name) is not None:
            yield name, event[name]


PREFIX = {"step": "train", "eval": "validation"}


# ---- writing ----

class TensorBoard:
    """Event files, written by the package tensorboard. Wall times are those of the steps' durations."""

    def __init__(self, folder, log):
        require("tensorboard.compat.proto")
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self.event, self.summary = event_pb2.Event, summary_pb2
        self.tensor, self.string = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self.writer = EventFileWriter(str(folder))
        self.clock = os.path.getmtime(log) - seconds_of(log)  # when the run began

    def write(self, event):
        kind = event["event"]
        if kind == "step":
            self.clock += number(event, "step_ms", 0) / 1e3
        if kind in PREFIX:
            self.add(event["step"], [self.summary.Summary.Value(tag=f"{PREFIX[kind]}/{name}", simple_value=value)
                                     for name, value in scalars(event)])
        elif kind == "sample":
            self.add(event["step"], [self.text("sample", str(event.get("text", "")))])
        elif kind == "run":
            self.add(0, [self.text("options", "    " + json.dumps(event.get("options", {}), indent=4).replace("\n", "\n    "))])

    def text(self, tag, text):
        about = self.summary.SummaryMetadata(
            plugin_data=self.summary.SummaryMetadata.PluginData(plugin_name="text"))
        return self.summary.Summary.Value(tag=tag, metadata=about, tensor=self.tensor(
            dtype=self.string, string_val=[text.encode("utf-8")]))

    def add(self, step, values):
        self.writer.add_event(self.event(wall_time=self.clock, step=step,
                                         summary=self.summary.Summary(value=values)))

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


def seconds_of(log):
    """How long the steps of a log took until now."""
    return sum(number(event, "step_ms", 0) for event in read_events(log, False) if event["event"] == "step") / 1e3


class WeightsAndBiases:
    """A run of Weights & Biases, by the package wandb, which asks for a login (WANDB_MODE=offline does not)."""

    def __init__(self, project, log):
        require("wandb")
        import wandb
        self.wandb, self.project, self.name, self.run = wandb, project, log.parent.resolve().name, None

    def write(self, event):
        kind = event["event"]
        if kind == "run" and not self.run:
            self.run = self.wandb.init(project=self.project, name=self.name, config=event.get("options", {}))
        elif kind in PREFIX and self.run:
            self.run.log({f"{PREFIX[kind]}/{name}": value for name, value in scalars(event)}, step=event["step"])
        elif kind == "end" and self.run:
            self.run.summary["status"] = event.get("status")

    def flush(self):
        """wandb sends by itself."""

    def close(self):
        if self.run:
            self.run.finish()


def write_csv(events, path):
    """A row per step. The columns of an evaluation are filled in the row of the step before it."""
    rows, columns = {}, ["step"]
    for event in events:
        kind = event["event"]
        if kind not in PREFIX or (kind == "eval" and not rows):
            continue
        row = rows.setdefault(event["step"] if kind == "step" else max(rows), {})
        row.update((name if kind == "step" else f"validation_{name}", value) for name, value in scalars(event))
        columns += [name for name in row if name not in columns]
    if not rows:
        raise LogError("the log has no step: expected that of a training")
    whole = path.is_file() or not path.exists()  # a pipe or a device, such as /dev/stdout, keeps its place
    partial = path.with_name(path.name + ".partial") if whole else path
    if not path.parent.is_dir():
        raise LogError(f"{path}: there is no folder {path.parent}")
    with open(partial, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for step, row in sorted(rows.items()):
            writer.writerow({"step": step, **row})
    if whole:
        partial.rename(path)


# ---- the whole ----

def export(arguments):
    log = arguments.run / "log.jsonl"
    if not log.exists():
        raise LogError(f"there is no {log}: expected the directory that --out named")
    events = read_events(log, arguments.follow)
    events = once(events if arguments.follow else of_one_run(log, events))
    if arguments.csv:
        if arguments.csv.exists() and arguments.csv.samefile(log):
            raise LogError(f"{arguments.csv} is the log itself: expected another name")
        write_csv(events, arguments.csv)
        return
    out = (TensorBoard(arguments.tensorboard, log) if arguments.tensorboard
           else WeightsAndBiases(arguments.wandb, log))
    try:
        for event in events:
            out.write(event)
            if arguments.follow:
                out.flush()
    except KeyboardInterrupt:  # of --follow
        pass
    finally:
        out.close()


def main():
    parser = argparse.ArgumentParser(
        prog="export.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--tensorboard", type=pathlib.Path, metavar="DIR", help="folder for event files")
    target.add_argument("--wandb", metavar="PROJECT", help="project of Weights & Biases")
    target.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="file to write")
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # from here on a pipe that breaks is reported
    if arguments.csv and arguments.follow:
        parser.error("--follow: expected --tensorboard or --wandb")
    try:
        export(arguments)
    except (LogError, OSError) as failure:
        said = f"{failure.filename}: {failure.strerror}" if getattr(failure, "filename", None) else failure
        print(f"export.py: {said}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    sys.exit(main())
